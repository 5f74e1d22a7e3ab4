"""Checkpoints that somebody has changed, and how they are refused."""

import io
import marshal
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

from megakit.errors import UserError


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def load(checkpoint: Path) -> None:
    from tests.megakit.models.networks import NetConfig

    NetConfig(initial_ckpt_path=str(checkpoint)).configure_model()


def refusal(checkpoint: Path, trace: Path | None = None) -> str:
    """Loads a poisoned checkpoint with a manifest that fits it, as a stranger would make it."""
    import pytest  # which the environments without NeMo lack

    from megakit.checkpoints.manifest import Manifest, list_files, write_manifest

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


# ---- Pickles ----


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
