"""A checkpoint's manifest, changed by somebody, and what is said about it."""

import hashlib
import json

from megakit.checkpoints.folders import MANIFEST
from megakit.checkpoints.manifest import OWN_DIGEST

WEIGHTS = "weights/__0_0.distcp"


def change(checkpoint, **changes):
    """Edits the manifest as somebody does who also makes its own digest right again."""
    path = checkpoint / MANIFEST
    content = json.loads(path.read_text()) | changes
    del content[OWN_DIGEST]
    text = json.dumps(content, sort_keys=True)
    content[OWN_DIGEST] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content))
