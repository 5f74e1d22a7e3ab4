"""Checkpoints of strangers: settings and files that would run code are refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("name", ["os.system", "builtins.eval"])
def test_a_target_in_the_context(checkpoint: Path, name: str) -> None:
    path = checkpoint / "context" / "io.json"
    content = json.loads(path.read_text())
    module, _, function = name.rpartition(".")
    target = {"type": "pyref", "module": module, "name": function}
    content["objects"]["extra"] = {"type": target, "items": [], "metadata": None, "paths": []}
    path.write_text(json.dumps(content))
    message = refusal(checkpoint)
    assert str(path) in message
    assert name in message


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("model.yaml", "!!python/object/apply:os.system ['touch trace']", "!!python/object/apply"),
        ("model.yaml", "optimizer:\n  _target_: os.system\n", "os.system"),
        ("8c1f2e", None, "posix.system"),  # NeMo names its pickles so
    ],
)
def test_poison_beside_the_context(
    checkpoint: Path, tmp_path: Path, name: str, content: str | None, named: str
) -> None:
    poison = pickle.dumps(Bomb(tmp_path / "trace")) if content is None else content.encode()
    (checkpoint / "context" / name).write_bytes(poison)
    message = refusal(checkpoint, tmp_path / "trace")
    assert f"{checkpoint}/context/{name}: the file is unsafe" in message
    assert named in message


def test_what_nemo_leaves_beside_the_context_is_taken(checkpoint: Path) -> None:
    context = checkpoint / "context"
    (context / "8c1f2e").write_bytes(pickle.dumps({"callback": NamedByNeMo.save, "path": context}))
    (context / "model.yaml").write_text("_target_: nemo.lightning.io.pl.TrainerContext\nseed: 1\n")
    with pytest.warns(UserWarning, match="could not be verified"):
        load(checkpoint)


class NamedByNeMo:
    def save(self) -> None: ...
