"""Checkpoints of strangers: what could run code or reach outside is refused by name, not run."""

import importlib
import json
import os
import pickle
import random
import shutil
import struct
import time
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
    with pytest.warns(UserWarning, match=r"has no manifest.json, so .* could not be verified"):
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
    assert f"names {name}, which is not a file in the same folder" in refusal(checkpoint)


CLASSES = (
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "pathlib.PosixPath",
    "collections.OrderedDict",
    "torch.Size",
)


@pytest.mark.parametrize("name", CLASSES)
def test_no_class_is_changed(checkpoint: Path, name: str) -> None:
    """Pickle's BUILD sets attributes of whatever is on its stack, a class as well."""
    module, _, cls = name.rpartition(".")
    owner = getattr(importlib.import_module(module), cls)
    before = dict(vars(owner))
    program = f"c{module}\n{cls}\n".encode() + b"N}X\x04\x00\x00\x00evilK\x01s\x86b."
    (checkpoint / "weights" / ".metadata").write_bytes(program)
    message = refusal(checkpoint)
    assert "weights/.metadata: cannot be read" in message
    assert dict(vars(owner)) == before


def test_no_program_changes_a_class_or_leaves_one(megatron: None) -> None:
    """Random programs over all that a `.metadata` may name."""
    from megakit.runtime.plain_metadata import _vocabulary
    from megakit.runtime.plain_pickle import Record, load

    vocabulary = _vocabulary()
    records = [entry.cls for entry in vocabulary.values() if isinstance(entry, Record)]
    owners = [*records, Path, pickle.Unpickler]
    before = [dict(vars(owner)) for owner in owners]
    names = [f"c{module}\n{name}\n".encode() for module, name in vocabulary if module != "torch"]
    words = ["fqn", "offset", "torch.strided", "TORCH_CONTIGUOUS_FORMAT", "relative_path", "/tmp"]
    texts = [b"X" + struct.pack("<I", len(word)) + word.encode() for word in words]
    operations = [*names, *texts, b"ctorch\nfloat32\n", b"ctorch\nSize\n", b"K\x01", b"N", b")"]
    operations += [
        b"]",
        b"}",
        b"(",
        b"t",
        b"\x85",
        b"\x86",
        b"a",
        b"s",
        b"R",
        b"b",
        b"\x81",
        b"\x94",
    ]
    dice = random.Random(1)
    kept = 0
    for _ in range(20_000):
        program = b"".join(dice.choice(operations) for _ in range(dice.randrange(1, 9)))
        try:
            value = load(program + b".", vocabulary)
        except Exception:  # `reading` makes a UserError of whatever it is
            continue
        kept += 1
        assert not isinstance(value, type)
        assert not callable(value)
    assert kept > 100
    assert [dict(vars(owner)) for owner in owners] == before


def test_what_runs_nothing_but_leads_astray(checkpoint: Path) -> None:
    """Each place in `.metadata` that torch's reader would follow."""
    for change, told in WRONG_PLACES.items():
        metadata = metadata_of(checkpoint)
        place = next(iter(metadata.storage_data.values()))
        name, _, value = change.partition("=")
        setattr(place, name, eval(value))
        target = shutil.copytree(checkpoint, checkpoint.with_name(f"{len(told)}-{name}-copy"))
        write_metadata(target, metadata)
        assert told in refusal(target), change
        shutil.rmtree(target)


WRONG_PLACES = {
    "relative_path=b'__0_0.distcp'": "which is not a file in the same folder",
    "relative_path=7": "which is not a file in the same folder",
    "relative_path=''": "which is not a file in the same folder",
    "relative_path='..'": "which is not a file in the same folder",
    "relative_path='.'": "which is not a file in the same folder",
    "relative_path='absent.distcp'": "No such file",
    "offset=-1": "is not a number of bytes",
    "offset=1.5": "is not a number of bytes",
    "offset=True": "is not a number of bytes",
    "offset=10**15": "beyond the end",
    "length=10**15": "beyond the end",
    "transform_descriptors=('zstd',)": "a transformation of",
}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("size", (10**6, 10**6), "weights do not fit"),
        ("size", (1, 1), "a part outside of the tensor"),
        ("size", (6,), "a part outside of the tensor"),
        ("chunks", [], "module.first.weight has 0 of 48 numbers"),
        ("chunks", "twice", "parts that overlap"),
        ("chunks", None, "no list of parts"),
        ("properties", None, "no data type"),
    ],
)
def test_sizes_are_compared_with_what_is_stored(
    checkpoint: Path, name: str, value: Any, told: str
) -> None:
    import torch

    metadata = metadata_of(checkpoint)
    entry = metadata.state_dict_metadata["module.first.weight"]
    if value == "twice":
        value = entry.chunks * 2
    setattr(entry, name, torch.Size(value) if name == "size" else value)
    write_metadata(checkpoint, metadata)
    assert told in refusal(checkpoint)


def test_a_tensor_larger_than_its_parts(checkpoint: Path) -> None:
    """No memory is allocated for what is not stored."""
    import torch

    from megakit.models.loading import read_tensors

    metadata = metadata_of(checkpoint)
    metadata.state_dict_metadata["module.first.weight"].size = torch.Size((2**50, 6))
    write_metadata(checkpoint, metadata)
    with pytest.raises(UserError, match="of 6,755,399,441,055,744 numbers"):
        read_tensors(str(checkpoint / "weights"))


def test_bytes_of_a_file_serve_one_tensor(checkpoint: Path) -> None:
    """Thousands of parts that name one large slice would read it thousands of times."""
    metadata = metadata_of(checkpoint)
    places = list(metadata.storage_data.values())
    one, other = [place for place in places if place.relative_path == places[0].relative_path][:2]
    other.offset, other.length = one.offset, max(one.length, other.length)
    write_metadata(checkpoint, metadata)
    assert "twice" in refusal(checkpoint)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_tensor_in_thousands_of_parts_is_checked_at_once(axis: int) -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    from megakit.runtime.plain_metadata import _overlap

    def part(number: int) -> ChunkStorageMetadata:
        offsets = [0, 0]
        offsets[axis] = number
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size([1, 1]))

    import torch

    parts = [part(number) for number in range(20_000)]
    began = time.process_time()
    assert not _overlap(parts)
    assert time.process_time() - began < 10
    assert _overlap([*parts, part(2500)])


def test_a_part_that_claims_more_than_its_file_has(checkpoint: Path) -> None:
    import torch

    metadata = metadata_of(checkpoint)
    entry = metadata.state_dict_metadata["module.first.weight"]
    entry.size = torch.Size((10**6, 10**6))
    entry.chunks[0].sizes = entry.size
    write_metadata(checkpoint, metadata)
    assert "4,000,000,000,000 bytes, and the files have fewer" in refusal(checkpoint)


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


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("hidden_size", "many", "hidden_size"),
        ("hidden_size", -8, "hidden_size"),
        ("bias_dropout_fusion", "yes", "bias_dropout_fusion"),
    ],
)
def test_settings_that_no_model_has(checkpoint: Path, field: str, value: Any, told: str) -> None:
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
    assert told in message


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
    assert f"{checkpoint / MANIFEST}: the manifest is unsafe" in str(error.value)
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
