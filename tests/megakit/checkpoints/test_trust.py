"""Checkpoints of strangers: what could run code or reach outside is refused by name, not run."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.layout import MANIFEST
from megakit.checkpoints.manifest import (
    Manifest,
    list_files,
    verify,
    verify_if_possible,
    write_manifest,
)
from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def test_the_bomb_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "trace")))
    assert (tmp_path / "trace").exists()


@pytest.fixture(scope="module")
def original(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.megakit.models.networks import Net, NetConfig, save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("original"), Net(NetConfig()))


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))


def load(checkpoint: Path) -> None:
    from tests.megakit.models.networks import NetConfig

    NetConfig(initial_ckpt_path=str(checkpoint)).configure_model()


def refusal(checkpoint: Path, trace: Path | None = None) -> str:
    """Loads a poisoned checkpoint with a manifest that fits it, as a stranger would make it."""
    if not any(path.is_symlink() for path in checkpoint.rglob("*")):
        files = list_files(checkpoint)
        write_manifest(checkpoint, Manifest("pretrain", "Net", "digits", 1, files=files))
    with pytest.raises(UserError) as error:
        load(checkpoint)
    assert trace is None or not trace.exists()
    return str(error.value)


def metadata_of(checkpoint: Path) -> Any:
    from megakit.runtime.safe_reading import read_metadata

    return read_metadata(checkpoint / "weights" / ".metadata")


def write_metadata(checkpoint: Path, metadata: Any) -> None:
    (checkpoint / "weights" / ".metadata").write_bytes(pickle.dumps(metadata))


def test_one_without_a_manifest_is_taken_with_a_warning(checkpoint: Path) -> None:
    """As NeMo's own ModelCheckpoint leaves it."""
    with pytest.warns(UserWarning, match=r"has no manifest.json: .* could not be verified"):
        load(checkpoint)


def test_metadata_that_is_as_megatron_writes_it(checkpoint: Path) -> None:
    write_metadata(checkpoint, metadata_of(checkpoint))
    with pytest.warns(UserWarning, match="could not be verified"):
        load(checkpoint)


def test_poisoned_metadata(checkpoint: Path, tmp_path: Path) -> None:
    write_metadata(checkpoint, Bomb(tmp_path / "trace"))
    message = refusal(checkpoint, tmp_path / "trace")
    assert f"{checkpoint}/weights/.metadata" in message
    assert "posix.system" in message


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "torch.load", "torch._utils._rebuild_tensor", "torch.hub.load", "os.system"],
)
def test_only_what_is_needed_can_be_named(checkpoint: Path, name: str) -> None:
    module, _, function = name.rpartition(".")
    program = f"c{module}\n{function}\n.".encode()  # pickle's instruction to look up a name
    (checkpoint / "weights" / ".metadata").write_bytes(program)
    assert f"names {name}, which no checkpoint needs" in refusal(checkpoint)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "folder/file"])
def test_metadata_that_leads_outside(checkpoint: Path, name: str) -> None:
    metadata = metadata_of(checkpoint)
    for info in metadata.storage_data.values():
        info.relative_path = name
    write_metadata(checkpoint, metadata)
    assert f"names {name}, which is not a file beside it" in refusal(checkpoint)


@pytest.mark.parametrize("forced", [False, True], ids=["", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_poisoned_common_state(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    import torch

    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save(
        {"epoch": 1, "extra": Bomb(tmp_path / "trace")}, checkpoint / "weights" / "common.pt"
    )
    message = refusal(checkpoint, tmp_path / "trace")
    assert f"{checkpoint}/weights/common.pt" in message
    assert "posix.system" in message


def test_poisoned_object_among_the_tensors(checkpoint: Path, tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    shard = checkpoint / "weights" / "__9_9.distcp"
    torch.save([Bomb(tmp_path / "trace")], shard)
    metadata = metadata_of(checkpoint)
    kinds = metadata.state_dict_metadata
    objects = [
        key for key in metadata.storage_data if isinstance(kinds[key.fqn], BytesStorageMetadata)
    ]
    assert objects
    for key in objects:
        metadata.storage_data[key].relative_path = shard.name
        metadata.storage_data[key].offset = 0
        metadata.storage_data[key].length = shard.stat().st_size
    write_metadata(checkpoint, metadata)
    message = refusal(checkpoint, tmp_path / "trace")
    assert str(checkpoint / "weights") in message
    assert "posix.system" in message


@pytest.mark.parametrize("name", ["weights/.metadata", "weights/common.pt"])
@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle", b"PK\x03\x04"], ids=repr)
def test_damaged_pickles(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)
    assert f"{checkpoint}/{name}: damaged" in refusal(checkpoint)


@pytest.mark.parametrize("name", ["weights/common.pt", "weights", "context", "context/io.json"])
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


def test_pipes_and_devices(checkpoint: Path) -> None:
    os.mkfifo(checkpoint / "weights" / "pipe")
    with pytest.raises(UserError, match="weights/pipe is neither a file nor a folder"):
        verify_if_possible(checkpoint)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "weights/../../secret"])
def test_a_manifest_that_leads_outside(checkpoint: Path, name: str) -> None:
    files = list_files(checkpoint) | {name: {"size": 1, "sha256": "0" * 64}}
    write_manifest(checkpoint, Manifest("pretrain", "Net", "digits", 1, files=files))
    with pytest.raises(UserError) as error:
        verify(checkpoint)
    assert f"{checkpoint / MANIFEST}: not to be trusted" in str(error.value)
    assert name in str(error.value)


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.eval", "subprocess.run", "posix.system", "builtins.getattr"]
)
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
        ("model.yml", "{'_target_': 'subprocess.run'}", "subprocess.run"),
        ("io.pkl", None, "posix.system"),
        ("8c1f2e", None, "posix.system"),  # NeMo names its pickles so
    ],
)
def test_poison_beside_the_context(
    checkpoint: Path, tmp_path: Path, name: str, content: str | None, named: str
) -> None:
    poison = pickle.dumps(Bomb(tmp_path / "trace")) if content is None else content.encode()
    (checkpoint / "context" / name).write_bytes(poison)
    message = refusal(checkpoint, tmp_path / "trace")
    assert f"{checkpoint}/context/{name}: not to be trusted" in message
    assert named in message


def test_what_nemo_leaves_beside_the_context_is_taken(checkpoint: Path) -> None:
    context = checkpoint / "context"
    (context / "8c1f2e").write_bytes(pickle.dumps({"callback": NamedByNeMo.save, "path": context}))
    (context / "model.yaml").write_text("_target_: nemo.lightning.io.pl.TrainerContext\nseed: 1\n")
    with pytest.warns(UserWarning, match="could not be verified"):
        load(checkpoint)


class NamedByNeMo:
    def save(self) -> None: ...
