"""Checkpoints of strangers: links and manifests that lead elsewhere are refused."""

import json
import pickle
import sys
from pathlib import Path

import pytest

from tests.megakit.poison import Bomb, load

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("name", ["io.json", "model.yaml", "8c1f2e", "payload.pkl"])
def test_what_the_context_names_does_not_run(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """Only io.json is read, as JSON; NeMo's reader would run each of these files."""
    path, trace = checkpoint / "context" / name, tmp_path / "trace"
    if name == "io.json":
        content = json.loads(path.read_text())
        call = {"type": "pyref", "module": "os", "name": "system"}
        command = {"type": "leaf", "value": f"touch {trace}", "paths": []}
        content["objects"]["extra"] = {
            "type": call,
            "items": [["Attr(name='command')", command]],
            "metadata": {"type": "pyref", "module": "antigravity", "name": "fly"},
            "paths": [],
        }
        config = next(key for key in content["objects"] if "config" in key.lower())
        reference = {"type": "ref", "key": "extra"}
        content["objects"][config]["items"].append(["Attr(name='evil')", reference])
        path.write_text(json.dumps(content))
    elif name == "model.yaml":
        path.write_text(f"!!python/object/apply:os.system ['touch {trace}']\n")
    else:  # NeMo names its pickles by their hash
        path.write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.warns(UserWarning, match="could not be verified"):
        load(checkpoint)
    assert not trace.exists()
    assert "antigravity" not in sys.modules
