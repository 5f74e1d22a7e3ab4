"""Weights of strangers: what could run code or reach outside is refused by name, not run."""

import json
import pickle
from pathlib import Path

import pytest

from megakit.errors import UserError
from tests.megakit.poison import Bomb, load, metadata_of, refusal, write_metadata

pytestmark = pytest.mark.usefixtures("megatron")


def test_the_bomb_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "trace")))
    assert (tmp_path / "trace").exists()


def test_metadata_that_is_as_megatron_writes_it(checkpoint: Path) -> None:
    write_metadata(checkpoint, metadata_of(checkpoint))
    with pytest.warns(UserWarning, match="could not be verified"):
        load(checkpoint)


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"", b"[]", b"{", b"{}", b"null", b"\xff", b"[" * 100_000),
        b'{"sharded_backend": "zarr"}',
        b'{"sharded_backend": "torch_dist", "sharded_backend_version": 99}',
        b'{"sharded_backend": "torch_dist", "sharded_backend_version": true}',
        b'{"sharded_backend": "torch_dist", "common_backend": "zarr"}',
        b'{"sharded_backend": "torch_dist", "other": 1}',
        b'{"sharded_backend": ["torch_dist"]}',
    ],
    ids=lambda content: repr(content)[:60],
)
def test_formats(checkpoint: Path, content: bytes | None) -> None:
    path = checkpoint / "weights" / "metadata.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    message = refusal(checkpoint)
    assert f"{checkpoint}/weights" in message
    assert "cannot be read" in message


def test_objects_in_files_of_their_own(checkpoint: Path, tmp_path: Path) -> None:
    """The format `zarr` makes Megatron read objects with a bare `torch.load`."""
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    with pytest.raises(UserError, match="objects in separate files"):
        TorchCommonLoadStrategy().load_sharded_objects({}, checkpoint)


@pytest.mark.parametrize("forced", [False, True], ids=["", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
@pytest.mark.parametrize("content", ["bomb", "a list", "another shape", "complex", "integers"])
def test_another_thing_instead_of_a_tensor(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, forced: bool
) -> None:
    import torch

    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    metadata = metadata_of(checkpoint)
    size = metadata.state_dict_metadata["module.first.weight"].size
    shard = checkpoint / "weights" / "__9_9.distcp"
    things = {
        "bomb": Bomb(tmp_path / "trace"),
        "a list": [1] * 1000,
        "another shape": torch.zeros(*size, 2),
        "complex": torch.zeros(*size, dtype=torch.complex64),
        "integers": torch.zeros(*size, dtype=torch.int32),
    }
    torch.save(things[content], shard)
    for index, place in metadata.storage_data.items():
        if index.fqn == "module.first.weight":
            place.relative_path, place.offset, place.length = shard.name, 0, shard.stat().st_size
    write_metadata(checkpoint, metadata)
    assert f"{shard}: cannot be read" in refusal(checkpoint, tmp_path / "trace")


def test_adapters_lead_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    """NeMo's AutoResume follows a file of this name to any folder."""
    from nemo import lightning as nl

    path = checkpoint / "weights" / "adapter_metadata.json"
    path.write_text(json.dumps({"model_ckpt_path": str(tmp_path)}))
    with pytest.raises(UserError, match="adapters are not read"):
        nl.AutoResume(resume_from_path=str(checkpoint)).get_trainer_ckpt_path()


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


def test_common_state_is_a_dictionary_of_names(tmp_path: Path) -> None:
    import torch

    from megakit.runtime.safe_reading import read_common

    path = tmp_path / "common.pt"
    torch.save({"step": 1, "rates": torch.ones(2)}, path)
    assert read_common(path).keys() == {"step", "rates"}
    for content in ({1: "step"}, [("step", 1)]):
        torch.save(content, path)
        with pytest.raises(UserError, match=f"{path}: cannot be read .*dictionary of names"):
            read_common(path)


def test_poisoned_object_among_the_tensors(checkpoint: Path, tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata = metadata_of(checkpoint)
    kinds = metadata.state_dict_metadata
    objects = [
        key for key in metadata.storage_data if isinstance(kinds[key.fqn], BytesStorageMetadata)
    ]
    assert objects
    for number, key in enumerate(objects):
        shard = checkpoint / "weights" / f"__9_{number}.distcp"
        torch.save([Bomb(tmp_path / "trace")], shard)
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
    assert f"{checkpoint}/{name}: cannot be read" in refusal(checkpoint)
