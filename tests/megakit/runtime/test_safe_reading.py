"""Weights of strangers: what could run code or reach outside is refused by name, not run."""

import importlib
import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from megakit.errors import UserError
from tests.megakit.poison import load, metadata_of, refusal, write_metadata

pytestmark = pytest.mark.usefixtures("megatron")


def named(name: str) -> bytes:
    """Pickle's instruction to look up a name."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def running_programs(trace: Path) -> dict[str, bytes]:
    """Pickles that make a file when Python's unpickler reads them."""
    system, path = named("os.system"), named("pathlib.PosixPath")
    command = f"touch {trace}"
    argument = text(command) + b"\x85R."
    touch = named("builtins.getattr") + path + text("touch") + b"\x86R"
    code = f"__import__('os').system({command!r})"
    return {
        "a call": system + argument,
        "a name of strings": b"\x80\x04" + text("os") + text("system") + b"\x93" + argument,
        "a name with dots": b"\x80\x04"
        + text("torch")
        + text("serialization.os.system")
        + b"\x93"
        + argument,
        "INST": b"(" + text(command) + b"ios\nsystem\n.",
        "OBJ": b"(" + system + text(command) + b"o.",
        "eval": named("builtins.eval") + text(code) + b"\x85R.",
        "exec": named("builtins.exec") + text(code) + b"\x85R.",
        "a method of a path": touch + path + text(str(trace)) + b"\x85R\x85R.",
    }


#: Names that lead to code, or to other files. The frameworks use most of them.
NAMES = (
    *("posix.system", "subprocess.run", "builtins.getattr", "builtins.__import__", "os.remove"),
    *("importlib.import_module", "runpy.run_path", "functools.partial", "pickle.loads"),
    *("torch.load", "torch.hub.load", "torch._utils._rebuild_tensor", "numpy.load"),
    "numpy.core.multiarray._reconstruct",
)
#: Classes that a checkpoint may name, or nearly. Pickle's BUILD changes what is on its stack.
CLASSES = (
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "pathlib.PosixPath",
    "collections.OrderedDict",
    "torch.Size",
)
EVIL = b"}" + text("evil") + b"K\x01s"
OTHER_PROGRAMS = {
    **{f"the name {name}": named(name) + b"." for name in NAMES},
    **{f"a state of {name}": named(name) + EVIL + b"b." for name in CLASSES},
    **{f"slots of {name}": named(name) + b"N" + EVIL + b"\x86b." for name in CLASSES},
    **{f"the class {name}": named(name) + b"." for name in CLASSES},
    "a persistent id": b"K\x01Q.",
    "a list in itself": b"]q\x00h\x00a.",
    "an extension": b"\x82\x01.",
}


def archive(program: bytes) -> bytes:
    """A file as `torch.save` writes it, with this pickle in it."""
    import torch

    saved, file = io.BytesIO(), io.BytesIO()
    torch.save({}, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            new.writestr(info.filename, program if is_pickle else old.read(info))
    return file.getvalue()


def keys_of(metadata: Any, place: str) -> list[Any]:
    """The parts of a tensor, or all objects among the tensors."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    kinds = metadata.state_dict_metadata
    if place == "a tensor":
        return [key for key in metadata.storage_data if key.fqn == "module.first.weight"]
    return [key for key in metadata.storage_data if type(kinds[key.fqn]) is BytesStorageMetadata]


def put(checkpoint: Path, place: str, content: bytes) -> None:
    """Puts a file's content where a checkpoint has a pickle, or what `torch.save` writes."""
    if not place.startswith("a"):
        (checkpoint / "weights" / place).write_bytes(content)
        return
    metadata = metadata_of(checkpoint)
    keys = keys_of(metadata, place)
    assert keys
    for number, key in enumerate(keys):
        shard = checkpoint / "weights" / f"__9_{number}.distcp"
        shard.write_bytes(content)
        stored = metadata.storage_data[key]
        stored.relative_path, stored.offset, stored.length = shard.name, 0, len(content)
    write_metadata(checkpoint, metadata)


def test_the_programs_run_where_nothing_guards(tmp_path: Path) -> None:
    """Otherwise the test below could not fail."""
    for name, program in running_programs(tmp_path / "trace").items():
        pickle.loads(program)
        assert (tmp_path / "trace").exists(), name
        (tmp_path / "trace").unlink()


@pytest.mark.parametrize("place", [".metadata", "common.pt", "a tensor", "an object"])
def test_no_program_runs_or_changes_a_class(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    owners = [
        getattr(importlib.import_module(module), cls)
        for module, _, cls in (name.rpartition(".") for name in CLASSES)
    ]
    before = [dict(vars(owner)) for owner in owners]
    for name, program in (running_programs(tmp_path / "trace") | OTHER_PROGRAMS).items():
        put(checkpoint, place, program if place == ".metadata" else archive(program))
        message = refusal(checkpoint, tmp_path / "trace")
        file = "__9_" if place.startswith("a") else place
        assert message.startswith(f"{checkpoint}/weights/{file}"), name
        assert "cannot be read" in message, name
        assert [dict(vars(owner)) for owner in owners] == before, name


def test_a_pickle_in_the_place_of_an_archive(checkpoint: Path, tmp_path: Path) -> None:
    """As `torch.save` wrote it in its early versions, which `torch.load` reads."""
    for program in running_programs(tmp_path / "trace").values():
        put(checkpoint, "common.pt", program)
        assert "common.pt: cannot be read" in refusal(checkpoint, tmp_path / "trace")


def test_a_refusal_names_what_was_found(checkpoint: Path) -> None:
    put(checkpoint, ".metadata", named("builtins.eval") + b".")
    message = refusal(checkpoint)
    assert f"{checkpoint}/weights/.metadata" in message
    assert "names builtins.eval, which no checkpoint needs" in message


@pytest.mark.parametrize("content", ["a list", "another shape"])
def test_another_thing_instead_of_a_tensor(checkpoint: Path, content: str) -> None:
    import torch

    size = metadata_of(checkpoint).state_dict_metadata["module.first.weight"].size
    file = io.BytesIO()
    torch.save([1] * 1000 if content == "a list" else torch.zeros(*size, 2), file)
    put(checkpoint, "a tensor", file.getvalue())
    assert f"{checkpoint}/weights/__9_0.distcp: cannot be read" in refusal(checkpoint)


def test_metadata_that_is_as_megatron_writes_it(checkpoint: Path) -> None:
    write_metadata(checkpoint, metadata_of(checkpoint))
    with pytest.warns(UserWarning, match="could not be verified"):
        load(checkpoint)


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"[]", b"{", b"{}"),
        b'{"sharded_backend": "zarr"}',
        b'{"sharded_backend": "torch_dist", "sharded_backend_version": 99}',
        b'{"sharded_backend": "torch_dist", "common_backend": "zarr"}',
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


def test_objects_in_files_of_their_own(checkpoint: Path) -> None:
    """The format `zarr` makes Megatron read objects with a bare `torch.load`."""
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    with pytest.raises(UserError, match="objects in separate files"):
        TorchCommonLoadStrategy().load_sharded_objects({}, checkpoint)


def test_adapters_lead_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    """NeMo's AutoResume follows a file of this name to any folder."""
    from nemo import lightning as nl

    path = checkpoint / "weights" / "adapter_metadata.json"
    path.write_text(json.dumps({"model_ckpt_path": str(tmp_path)}))
    with pytest.raises(UserError, match="adapters are not read"):
        nl.AutoResume(resume_from_path=str(checkpoint)).get_trainer_ckpt_path()


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


@pytest.mark.parametrize("name", ["weights/.metadata", "weights/common.pt"])
@pytest.mark.parametrize("content", [b"", b"not a pickle"], ids=repr)
def test_damaged_pickles(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)
    assert f"{checkpoint}/{name}: cannot be read" in refusal(checkpoint)
