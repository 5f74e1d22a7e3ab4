"""Pickles that attack whoever loads them, and their insertion into a checkpoint's pickles.

A fragment is a piece of a pickle that leaves one object on the stack. Every payload is harmless: it
creates a trace file in the run's folder, or asks for memory or time.
"""

import io
import marshal
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

#: A fragment for the path of a trace file.
Fragment = Callable[[Path], bytes]


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    return b"L%dL\n" % value


def blob(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def found(module: str, name: str) -> bytes:
    """What a module has under a name, which may have dots."""
    return text(module) + text(name) + b"\x93"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def dictionary(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(name) + value for name, value in items.items()) + b"u"


def build(target: bytes, state: bytes) -> bytes:
    return target + state + b"b"


def set_attribute(target: bytes, name: str, value: bytes) -> bytes:
    """BUILD with a slot state, which sets attributes even of classes."""
    return build(target, b"N" + dictionary(**{name: value}) + b"\x86")


def shell(trace: Path) -> bytes:
    return text(f"touch '{trace}'")


def python(trace: Path) -> bytes:
    return text(f"open({str(trace)!r}, 'w').close()")


def plain(*body: bytes) -> bytes:
    """A whole pickle of one fragment."""
    return b"\x80\x04" + b"".join(body) + b"."


def _function(trace: Path) -> bytes:
    """A function made of marshalled code."""
    code = marshal.dumps(compile(python(trace)[5:], "payload", "exec"))
    return call(
        found("types", "FunctionType"), call(found("marshal", "loads"), blob(code)), dictionary()
    )


def _nested(depth: int, begin: bytes, end: bytes) -> bytes:
    return begin * depth + end * depth


def _doubled(times: int) -> bytes:
    """A tuple of itself twice, and again, and again: 2 to the power of `times` elements."""
    return b")" + b"2\x86" * times


_OS_SYSTEM = found("os", "system")
_PATH = found("pathlib", "PosixPath")
_STORAGE = found("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_METADATA = found("torch.distributed.checkpoint.metadata", "TensorStorageMetadata")

#: Callables that run commands or code, write, connect or end the process.
DANGEROUS: dict[str, Fragment] = {
    "os.system": lambda trace: call(_OS_SYSTEM, shell(trace)),
    "posix.system, GLOBAL": lambda trace: call(b"cposix\nsystem\n", shell(trace)),
    "os.popen": lambda trace: call(found("os", "popen"), shell(trace)),
    "os._exit": lambda trace: call(found("os", "_exit"), number(0)),
    "sys.exit": lambda trace: call(found("sys", "exit"), number(0)),
    "os.abort": lambda trace: call(found("os", "abort")),
    "os.remove": lambda trace: call(found("os", "remove"), text(f"{trace.parent}/canary")),
    "INST": lambda trace: b"(" + shell(trace) + b"ios\nsystem\n",
    "OBJ": lambda trace: b"(" + _OS_SYSTEM + shell(trace) + b"o",
    "NEWOBJ": lambda trace: found("subprocess", "Popen") + b"(" + text("true") + b"t\x81",
    "NEWOBJ_EX": lambda trace: found("subprocess", "Popen") + b")" + dictionary() + b"\x92",
    "subprocess.Popen": lambda trace: call(
        found("subprocess", "Popen"), b"(" + text("touch") + text(str(trace)) + b"l"
    ),
    "subprocess.getoutput": lambda trace: call(found("subprocess", "getoutput"), shell(trace)),
    "exec": lambda trace: call(found("builtins", "exec"), python(trace)),
    "eval": lambda trace: call(found("builtins", "eval"), python(trace)),
    "__import__": lambda trace: call(found("builtins", "__import__"), text("antigravity")),
    "an import": lambda trace: found("antigravity", "fly"),
    "import_module": lambda trace: call(found("importlib", "import_module"), text("this")),
    "open": lambda trace: call(found("builtins", "open"), text(str(trace)), text("w")),
    "io.FileIO": lambda trace: call(found("_io", "FileIO"), text(str(trace)), text("w")),
    "getattr": lambda trace: call(
        call(
            found("builtins", "getattr"),
            call(found("importlib", "import_module"), text("os")),
            text("system"),
        ),
        shell(trace),
    ),
    "partial": lambda trace: call(
        call(found("functools", "partial"), _OS_SYSTEM, shell(trace)),
    ),
    "partial, BUILD": lambda trace: call(
        build(
            call(found("functools", "partial"), found("builtins", "len")),
            b"(" + _OS_SYSTEM + b"(" + shell(trace) + b"t}Nt",
        )
    ),
    "methodcaller": lambda trace: call(
        call(found("operator", "methodcaller"), text("system"), shell(trace)),
        call(found("importlib", "import_module"), text("os")),
    ),
    "torch.load": lambda trace: call(found("torch", "load"), text(f"{trace.parent}/evil.pkl")),
    "torch.serialization.os": lambda trace: call(
        found("torch.serialization", "os.system"), shell(trace)
    ),
    "dotted name": lambda trace: call(
        found("pathlib", "PosixPath.touch"), call(_PATH, text(str(trace)))
    ),
    "dotted globals": lambda trace: call(
        found("torch.distributed.checkpoint.metadata", "os.system"), shell(trace)
    ),
    "torch.hub": lambda trace: call(found("torch.hub", "load"), text("a/b"), text("c")),
    "_load_from_bytes": lambda trace: call(
        found("torch.storage", "_load_from_bytes"), blob(plain(call(_OS_SYSTEM, shell(trace))))
    ),
    "pickle.loads": lambda trace: call(
        found("pickle", "loads"), blob(plain(call(_OS_SYSTEM, shell(trace))))
    ),
    "runpy": lambda trace: call(found("runpy", "run_path"), text(f"{trace.parent}/evil.py")),
    "webbrowser": lambda trace: call(found("webbrowser", "open"), text("file:///dev/null")),
    "code object": lambda trace: call(_function(trace)),
    "code, runsource": lambda trace: call(
        found("code", "InteractiveInterpreter.runsource"),
        call(found("code", "InteractiveInterpreter")),
        python(trace),
    ),
    "timeit": lambda trace: call(
        found("timeit", "timeit"),
        python(trace),
        text("pass"),
        found("time", "perf_counter"),
        number(1),
    ),
    "ctypes.CDLL": lambda trace: call(found("ctypes", "CDLL"), text(f"{trace.parent}/evil.so")),
    "socket": lambda trace: call(
        found("socket", "create_connection"),
        b"(" + text("192.0.2.1") + b"K\x50t",
        number(1),
    ),
    "rmtree": lambda trace: call(found("shutil", "rmtree"), text(f"{trace.parent}/out")),
    "PERSID": lambda trace: b"P" + str(trace).encode() + b"\n",
    "BINPERSID": lambda trace: shell(trace) + b"Q",
    "EXT1": lambda trace: b"\x82\x01",
    "EXT4": lambda trace: b"\x84\xff\xff\xff\x7f",
}

#: Harmless by themselves, but allowed callables and classes are turned against the reader.
ABUSE: dict[str, Fragment] = {
    "PosixPath.name": lambda trace: set_attribute(_PATH, "name", text("x")),
    "PosixPath.rename": lambda trace: set_attribute(_PATH, "rename", found("torch", "Size")),
    "PosixPath.__str__": lambda trace: set_attribute(_PATH, "__str__", found("torch", "Size")),
    "PosixPath.exists": lambda trace: set_attribute(_PATH, "exists", found("torch", "Size")),
    "_StorageInfo.offset": lambda trace: set_attribute(_STORAGE, "offset", number(0)),
    "_StorageInfo.__eq__": lambda trace: set_attribute(_STORAGE, "__eq__", found("torch", "Size")),
    "TensorStorageMetadata.size": lambda trace: set_attribute(_METADATA, "size", number(1)),
    "class, plain state": lambda trace: build(_PATH, dictionary(name=text("x"))),
    "__class__": lambda trace: set_attribute(_STORAGE + b")\x81", "__class__", _METADATA),
    "__dict__": lambda trace: set_attribute(_STORAGE + b")\x81", "__dict__", dictionary()),
    "getattr of a pickle": lambda trace: call(
        found("builtins", "getattr"), _PATH, text("write_text")
    ),
    "len": lambda trace: call(found("builtins", "len"), text("x")),
    "print": lambda trace: call(found("builtins", "print"), text("\x1b[2J")),
    "sleep": lambda trace: call(found("time", "sleep"), number(1000)),
    "input": lambda trace: call(found("builtins", "input")),
    "Decimal": lambda trace: call(found("decimal", "Decimal"), text("1e999999999")),
    "layout of a name": lambda trace: call(
        found("torch.serialization", "_get_layout"), text("os.system")
    ),
    "a GPU": lambda trace: call(found("torch", "device"), text("cuda:99")),
    "format 99": lambda trace: call(
        found("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), number(99)
    ),
    "Size of text": lambda trace: call(found("torch", "Size"), text("abc")),
    "path of numbers": lambda trace: call(_PATH, number(1)),
    "unhashable key": lambda trace: b"}]Ns",
}

#: What asks for memory, depth or time.
BOMBS: dict[str, Fragment] = {
    "bytearray": lambda trace: call(found("builtins", "bytearray"), number(10**13)),
    "list of a range": lambda trace: call(
        found("builtins", "list"), call(found("builtins", "range"), number(10**12))
    ),
    "pow": lambda trace: call(found("builtins", "pow"), number(10), number(10**10)),
    "torch.empty": lambda trace: call(found("torch", "zeros"), number(10**13)),
    "nested lists": lambda trace: _nested(100_000, b"]", b"")[:-1] + b"]" + b"a" * 99_999,
    "nested tuples": lambda trace: b")" + b"\x85" * 200_000,
    "nested dictionaries": lambda trace: b"}" + b"N" * 0 + (b"N}" * 50_000) + b"s" * 50_000,
    "nested calls": lambda trace: (_PATH + b"(") * 20_000 + b"tR" * 20_000,
    "marks": lambda trace: b"(" * 200_000 + b"t" * 200_000,
    "doubled tuples": lambda trace: _doubled(60),
    "Size of doubled": lambda trace: call(found("torch", "Size"), _doubled(60)),
    "memo index": lambda trace: b"Nr\xfe\xff\xff\x7f",
    "memo missing": lambda trace: b"j\xff\xff\xff\x7f",
    "memo negative": lambda trace: b"Np-1\n",
    "frame": lambda trace: b"\x95" + struct.pack("<Q", 1 << 40) + b"N",
    "BINBYTES8": lambda trace: b"\x8e" + struct.pack("<Q", 1 << 42) + b"x",
    "BYTEARRAY8": lambda trace: b"\x96" + struct.pack("<Q", 1 << 42) + b"x",
    "BINUNICODE8": lambda trace: b"\x8d" + struct.pack("<Q", (1 << 63) - 1) + b"x",
    "LONG4": lambda trace: b"\x8b" + struct.pack("<i", 1 << 22) + b"\x7f" * (1 << 22),
    "LONG4, negative": lambda trace: b"\x8b" + struct.pack("<i", -5),
    "LONG of digits": lambda trace: b"L" + b"9" * 1_000_000 + b"L\n",
    "a list in itself": lambda trace: b"]2a",
    "no mark": lambda trace: b"t",
    "empty stack": lambda trace: b"0" * 10,
}

#: Whole pickles that are none, or cut.
BROKEN: dict[str, bytes] = {
    "empty": b"",
    "a byte": b"\x80",
    "protocol 255": b"\x80\xffN.",
    "None": plain(b"N"),
    "a number": plain(number(1)),
    "a dictionary": plain(b"}"),
    "a path": plain(call(_PATH, text("x"))),
    "a class": plain(_STORAGE),
    "an empty Metadata": plain(
        found("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81"
    ),
    "text": b"I am not a pickle\n",
    "zeros": bytes(10_000),
}


def insert(pickled: bytes, fragment: bytes, at_end: bool = False) -> bytes:
    """A pickle of the same object that makes another one on the way and drops it."""
    pieces = _pieces(pickled)
    at = len(pieces) - 1 if at_end else 1
    return b"".join([*pieces[:at], fragment, b"0", *pieces[at:]])


def insert_item(pickled: bytes, fragment: bytes) -> bytes:
    """A pickle of a dictionary with one more item; torch's own unpickler knows no POP."""
    return b"".join([pickled[:-1], text("more"), fragment, b"s."])


def edit(pickled: bytes, dice: random.Random) -> bytes:
    """Deletes, doubles, swaps or replaces some operations."""
    pieces = _pieces(pickled)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(1, len(pieces) - 1)
        other = dice.randrange(1, len(pieces) - 1)
        how = dice.choice(("delete", "double", "swap", "replace"))
        if how == "delete":
            del pieces[at]
        elif how == "double":
            pieces.insert(at, pieces[at])
        elif how == "swap":
            pieces[at], pieces[other] = pieces[other], pieces[at]
        else:
            pieces[at] = dice.choice((b"N", b"}", b"]", b")", b"K\x00", b"0", b"2", b"R", b"b"))
    edited = b"".join(pieces)
    return edited if edited != b"".join(_pieces(pickled)) else edited[:-1]


def _pieces(pickled: bytes) -> list[bytes]:
    """A pickle's operations, without the frames, which would tell wrong lengths."""
    operations = [(one.name, at) for one, _, at in pickletools.genops(pickled)]
    ends = [at for _, at in operations[1:]] + [len(pickled)]
    return [
        pickled[at:end] for (name, at), end in zip(operations, ends, strict=True) if name != "FRAME"
    ]


def change_archive(archive: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """One of torch's archives with another `data.pkl`."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(written, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                content = change(content)
            new.writestr(zipfile.ZipInfo(entry.filename), content)
    return written.getvalue()
