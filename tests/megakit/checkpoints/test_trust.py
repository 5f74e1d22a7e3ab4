"""Checkpoints of strangers: links, manifests and settings that lead elsewhere are refused."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.folders import MANIFEST
from megakit.checkpoints.manifest import (
    Manifest,
    list_files,
    verify,
    verify_if_possible,
    write_manifest,
)
from megakit.errors import UserError
from tests.megakit.poison import Bomb, load, refusal

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", "many"), ("bias_dropout_fusion", "yes")]
)
def test_settings_that_no_model_has(checkpoint: Path, field: str, value: Any) -> None:
    path = checkpoint / "context" / "io.json"
    content = json.loads(path.read_text())
    items = [pair for one in content["objects"].values() for pair in one["items"]]
    for pair in items:
        if pair[0] == f"Attr(name='{field}')":
            pair[1] = {"type": "leaf", "value": value, "paths": []}
    assert any(pair[0] == f"Attr(name='{field}')" for pair in items)
    path.write_text(json.dumps(content))
    message = refusal(checkpoint)
    assert str(checkpoint) in message
    assert field in message


@pytest.mark.parametrize("name", ["weights/common.pt", "context"])
def test_symbolic_links(checkpoint: Path, tmp_path: Path, name: str) -> None:
    place = tmp_path / "elsewhere"
    (checkpoint / name).rename(place)
    (checkpoint / name).symlink_to(place)
    assert f"{name} is a symbolic link" in refusal(checkpoint)
    with pytest.raises(UserError, match=f"{name} is a symbolic link"):
        verify_if_possible(checkpoint)
    write_manifest(checkpoint, Manifest("pretrain", "Net", "digits", 1))
    with pytest.raises(UserError, match=f"{name} is a symbolic link"):
        verify(checkpoint)


@pytest.mark.parametrize("name", ["/etc/passwd", "weights/../../secret"])
def test_a_manifest_that_leads_outside(checkpoint: Path, name: str) -> None:
    files = list_files(checkpoint) | {name: {"size": 1, "sha256": "0" * 64}}
    write_manifest(checkpoint, Manifest("pretrain", "Net", "digits", 1, files=files))
    with pytest.raises(UserError) as error:
        verify(checkpoint)
    assert f"{checkpoint / MANIFEST}: the manifest is unsafe" in str(error.value)
    assert name in str(error.value)


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
