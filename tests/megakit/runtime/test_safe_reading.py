"""Checkpoints of strangers: no code of a file runs; what Megatron and NeMo write comes back."""

import dataclasses
import enum
import importlib
import io
import json
import marshal
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megakit.errors import UserError
from tests.megakit.poison import load, metadata_of, refusal, write_metadata

pytestmark = pytest.mark.usefixtures("megatron")

WEIGHT = "module.first.weight"


def text(value: object) -> bytes:
    return b"X" + struct.pack("<I", len(str(value))) + str(value).encode()


def blob(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def named(name: str) -> bytes:
    """Pickle's instruction to look up a name."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode()


def call(function: str | bytes, *arguments: bytes) -> bytes:
    called = named(function) if isinstance(function, str) else function
    return called + b"(" + b"".join(arguments) + b"tR"


def whole(program: bytes) -> bytes:
    return b"\x80\x04" + program + b"."


def archive(program: bytes) -> bytes:
    """Returns a file of `torch.save` with this pickle in it."""
    import torch

    saved, file = io.BytesIO(), io.BytesIO()
    torch.save({}, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            new.writestr(info.filename, program if is_pickle else old.read(info))
    return file.getvalue()


def running_programs(trace: Path) -> dict[str, bytes]:
    """Pickles of values; Python's unpickler makes a file when it creates the value."""
    shell, code = text(f"touch {trace}"), f"open({str(trace)!r}, 'w').close()"
    system, path = named("os.system"), named("pathlib.PosixPath")
    module = call("importlib.import_module", text("os"))
    inner = blob(whole(call(system, shell)))
    saved = blob(archive(whole(call(system, shell))))
    compiled = call("marshal.loads", blob(marshal.dumps(compile(code, "payload", "exec"))))
    return {
        "a call": call(system, shell),
        "a name of strings": call(text("os") + text("system") + b"\x93", shell),
        "a name with dots": call(text("torch") + text("serialization.os.system") + b"\x93", shell),
        "INST": b"(" + shell + b"ios\nsystem\n",
        "OBJ": b"(" + system + shell + b"o",
        "a process": call("subprocess.Popen", b"(" + text("touch") + text(trace) + b"l"),
        "eval": call("builtins.eval", text(code)),
        "exec": call("builtins.exec", text(code)),
        "a file": call("_io.FileIO", text(trace), text("w")),
        "a function of a module": call(call("builtins.getattr", module, text("system")), shell),
        "a method of a path": call(
            call("builtins.getattr", path, text("touch")), call(path, text(trace))
        ),
        "a method by name": call(call("operator.methodcaller", text("system"), shell), module),
        "a partial": call(call("functools.partial", system, shell)),
        "a pickle in a pickle": call("pickle.loads", inner),
        "torch's pickle in a pickle": call("torch.storage._load_from_bytes", saved),
        "a code object": call(call("types.FunctionType", compiled, b"}")),
    }


EVIL = b"}" + text("evil") + b"K\x01s"
#: Names that checkpoints use, or nearly. BUILD sets attributes of what is on pickle's stack.
OWNERS = (
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "collections.OrderedDict",
)
#: What changes the process, or what a library registered with torch as safe.
OTHER_PROGRAMS = {
    **{f"a state of {name}": named(name) + EVIL + b"b" for name in OWNERS},
    **{f"slots of {name}": named(name) + b"N" + EVIL + b"\x86b" for name in OWNERS},
    "a state of an Enum's member": call(OWNERS[1], b"K\x00") + EVIL + b"b",
    "numpy's constructor": named("numpy.core.multiarray._reconstruct"),
    "a device mesh": named("torch.distributed.device_mesh.DeviceMesh"),
    "torch.load": named("torch.load"),
    "NEWOBJ": named("subprocess.Popen") + b")\x81",
    "NEWOBJ_EX": named("subprocess.Popen") + b")}\x92",
    "a persistent id": b"K\x01Q",
    "an extension": b"\x82\x01",
    "itself": b"]2a",
    "nothing": b"",
}


def put(checkpoint: Path, place: str, content: bytes) -> None:
    """Puts content in the place of a file, of a tensor's parts, or of the objects among them."""
    if not place.startswith("a"):
        (checkpoint / "weights" / place).write_bytes(content)
        return
    metadata = metadata_of(checkpoint)
    kinds = metadata.state_dict_metadata
    (checkpoint / "weights" / "__9_0.distcp").write_bytes(content)
    for key, stored in metadata.storage_data.items():
        is_object = type(kinds[key.fqn]).__name__ == "BytesStorageMetadata"
        if is_object if place == "an object" else key.fqn == WEIGHT:
            stored.relative_path, stored.offset, stored.length = "__9_0.distcp", 0, len(content)
    write_metadata(checkpoint, metadata)


def test_the_programs_run_where_nothing_guards(tmp_path: Path) -> None:
    """Otherwise the test below could not fail."""
    for name, program in running_programs(tmp_path / "trace").items():
        value = pickle.loads(whole(program))
        if hasattr(value, "wait"):
            value.wait()
        assert (tmp_path / "trace").exists(), name
        (tmp_path / "trace").unlink()


@pytest.mark.parametrize("place", [".metadata", "common.pt", "a tensor", "an object"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_program_runs_or_changes_a_class(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    owners = [
        getattr(importlib.import_module(module), name)
        for module, _, name in (owner.rpartition(".") for owner in OWNERS)
    ]
    owners.append(owners[1](0))
    before = [dict(vars(owner)) for owner in owners]
    original = metadata_of(checkpoint)
    programs = running_programs(tmp_path / "trace") | OTHER_PROGRAMS
    for number, (name, program) in enumerate(programs.items()):
        write_metadata(checkpoint, original)
        # Early versions of torch wrote pickles without an archive, and `torch.load` reads them.
        is_pickle = place == ".metadata" or number % 4 == 3
        put(checkpoint, place, whole(program) if is_pickle else archive(whole(program)))
        message = refusal(checkpoint, tmp_path / "trace")
        file = "" if place.startswith("a") else f"/{place}"
        assert message.startswith(f"{checkpoint}/weights{file}: cannot be read"), name
        assert [dict(vars(owner)) for owner in owners] == before, name


def test_a_refusal_names_what_was_found(checkpoint: Path) -> None:
    put(checkpoint, ".metadata", named("builtins.eval") + b".")
    assert "names builtins.eval, which no checkpoint needs" in refusal(checkpoint)


def test_what_libraries_registered_is_registered_again(checkpoint: Path) -> None:
    import torch

    registered = set(torch.serialization.get_safe_globals())
    assert registered
    with pytest.warns(UserWarning, match="could not be verified"):
        load(checkpoint)
    assert set(torch.serialization.get_safe_globals()) == registered


OUTSIDE = "which is not a file in the same folder"
NAMES = ("../../secret", "/etc/passwd", "folder/file", "./__0_0.distcp", b"__0_0.distcp")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        *(("relative_path", value, OUTSIDE) for value in NAMES),
        *(("relative_path", value, "cannot be read") for value in ("absent.distcp", "a\0b", "..")),
        *(("offset", value, "cannot be read") for value in (-1, 1.5, 10**15, 10**30, None)),
        *(("length", value, "cannot be read") for value in (-1, 1.5, 0, 10**30, None)),
        ("transform_descriptors", ("os.system",), "cannot be read"),
    ],
)
def test_a_place_that_leads_astray(checkpoint: Path, name: str, value: Any, told: str) -> None:
    metadata = metadata_of(checkpoint)
    index = next(index for index in metadata.storage_data if index.fqn == WEIGHT)
    setattr(metadata.storage_data[index], name, value)
    write_metadata(checkpoint, metadata)
    assert told in refusal(checkpoint)


def _half(chunks: list[Any]) -> list[Any]:
    import torch

    chunks[0].sizes = torch.Size([chunks[0].sizes[0] // 2, *chunks[0].sizes[1:]])
    return chunks


def _moved(chunks: list[Any]) -> list[Any]:
    return [dataclasses.replace(chunks[0], offsets=(2**40, 2**40))]


def _doubled_half(chunks: list[Any]) -> list[Any]:
    return _half(chunks) * 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda entry: setattr(entry, "size", (10**6, 10**6)), "has 48 of 1,000,000,000,000"),
        (lambda entry: setattr(entry, "chunks", []), "has 0 of 48 numbers"),
        (lambda entry: setattr(entry, "chunks", _half(entry.chunks)), "has 24 of 48 numbers"),
        (lambda entry: setattr(entry, "chunks", entry.chunks * 2), "has 96 of 48 numbers"),
        (lambda entry: setattr(entry, "chunks", _moved(entry.chunks)), "lie outside of it"),
        (lambda entry: setattr(entry, "chunks", _doubled_half(entry.chunks)), "overlap"),
        (lambda entry: setattr(entry, "chunks", None), "cannot be read"),
        (lambda entry: setattr(entry, "properties", None), "cannot be read"),
    ],
)
def test_a_tensor_of_which_parts_are_missing(
    checkpoint: Path, change: Callable[[Any], None], told: str
) -> None:
    metadata = metadata_of(checkpoint)
    change(metadata.state_dict_metadata[WEIGHT])
    write_metadata(checkpoint, metadata)
    assert told in refusal(checkpoint)


@pytest.mark.parametrize("name", [5, None, ("module",)])
def test_a_tensor_whose_name_is_not_text(checkpoint: Path, name: Any) -> None:
    metadata = metadata_of(checkpoint)
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata[WEIGHT]
    write_metadata(checkpoint, metadata)
    assert "it names a tensor" in refusal(checkpoint)


@pytest.mark.parametrize("content", ["a list", "another shape"])
def test_another_thing_instead_of_a_tensor(checkpoint: Path, content: str) -> None:
    import torch

    size = metadata_of(checkpoint).state_dict_metadata[WEIGHT].size
    file = io.BytesIO()
    torch.save([1] * 1000 if content == "a list" else torch.zeros(*size, 2), file)
    put(checkpoint, "a tensor", file.getvalue())
    assert f"{checkpoint}/weights: cannot be read" in refusal(checkpoint)


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"[]", b"{", b"{}", b"[" * 100_000),
        b'{"sharded_backend": "zarr"}',
        b'{"sharded_backend": "torch_dist", "sharded_backend_version": 99}',
        b'{"sharded_backend": "torch_dist", "common_backend": "zarr"}',
        b'{"sharded_backend": "torch_dist", "more": 1}',
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


def test_adapters_lead_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    """NeMo's AutoResume follows a file of this name to any folder."""
    from nemo import lightning as nl

    path = checkpoint / "weights" / "adapter_metadata.json"
    path.write_text(json.dumps({"model_ckpt_path": str(tmp_path)}))
    with pytest.raises(UserError, match="adapters are not read"):
        nl.AutoResume(resume_from_path=str(checkpoint)).get_trainer_ckpt_path()


def test_common_state_is_a_dictionary(tmp_path: Path) -> None:
    """NeMo's `ModelCheckpoint` saves its folder as a path in each checkpoint of a run."""
    import torch

    from megakit.runtime.safe_reading import read_common

    path = tmp_path / "common.pt"
    common = {"step": 1, "dirpath": Path("/runs", "pretrain")}
    torch.save(common | {"rates": torch.ones(2)}, path)
    assert common.items() <= read_common(path).items()
    torch.save([("step", 1)], path)
    with pytest.raises(UserError, match=f"{path}: cannot be read .*a list"):
        read_common(path)


@pytest.mark.parametrize("version", ["3.11.2", "3.12", "3.13"])
def test_checkpoints_of_other_pythons(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """3.11.2 pickles an Enum's member as a call of `getattr`, 3.13 a path of another module."""
    import torch

    from megakit.runtime.safe_reading import read_common

    metadata = metadata_of(checkpoint)
    metadata.storage_meta.checkpoint_id = Path("/runs/pretrain")
    common = checkpoint / "weights" / "common.pt"
    if version == "3.11.2":
        reduce = lambda member, _: (getattr, (type(member), member.name))  # noqa: E731
        monkeypatch.setattr(enum.Enum, "__reduce_ex__", reduce)
    made = pickle.dumps(metadata, protocol=3)
    assert (b"getattr" in made) == (version == "3.11.2")
    common_pickle = pickle.dumps({"dirpath": Path("/runs")}, protocol=2)
    if version == "3.13":
        made, common_pickle = (
            one.replace(b"cpathlib\n", b"cpathlib._local\n") for one in (made, common_pickle)
        )
        assert b"_local" in made
    (checkpoint / "weights" / ".metadata").write_bytes(made)
    found = metadata_of(checkpoint)
    assert found == metadata
    assert found.state_dict_metadata[WEIGHT].properties.memory_format is torch.contiguous_format
    with pytest.warns(UserWarning, match="could not be verified"):
        load(checkpoint)
    common.write_bytes(archive(common_pickle))
    assert read_common(common) == {"dirpath": Path("/runs")}


@pytest.mark.parametrize("name", ["weights/.metadata", "weights/common.pt"])
@pytest.mark.parametrize("content", [b"", b"not a pickle"], ids=repr)
def test_damaged_pickles(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)
    assert f"{checkpoint}/{name}: cannot be read" in refusal(checkpoint)
