"""Watches what a process does while it reads a checkpoint, and records every crime."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"}
STARTS |= {"webbrowser.open", "os.startfile", "code.__new__", "marshal.loads"}
CHANGES = {"os.rename", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
CHANGES |= {"os.chown", "os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile"}
#: Modules of the standard library that only an attack imports: importing them prints or connects.
BAIT = {"this", "antigravity", "attack_bait"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Sandbox:
    """The folder of one run, and what in it nobody may touch.

    Attributes:
        folder: Everything of this run.
    """

    folder: Path

    @property
    def out(self) -> Path:
        """The script's `--output-dir`, where alone it may write."""
        return self.folder / "out"

    @property
    def trace(self) -> Path:
        """The file that a payload creates."""
        return self.folder / "trace"

    @property
    def canary(self) -> Path:
        """A file outside of the checkpoint that some mutations point to."""
        return self.folder / "canary"

    @property
    def audit(self) -> Path:
        """What the audit hook recorded, one line per crime."""
        return self.folder / "audit.txt"

    @property
    def err(self) -> Path:
        """The script's standard error."""
        return self.folder / "err.txt"


def watch(sandbox: Sandbox, classes: list[Any]) -> None:
    """Records from now on, in this process, what no reading of a checkpoint has to do.

    An audit hook stays for the rest of the process: only for forks.

    Args:
        sandbox: Where the process may write, and where crimes are recorded.
        classes: Classes and modules whose attributes nobody may overwrite.
    """
    allowed = tuple(f"{path}/" for path in (sandbox.out, sandbox.folder / "tmp"))
    canary, bait = os.path.realpath(sandbox.canary), BAIT - sys.modules.keys()

    record = _recorder(sandbox)
    _watch_attributes(classes, record)

    def may_write(name: Any, folder: int = -1) -> bool:
        if isinstance(name, int):  # opened before, and judged then
            return True
        name = os.fsdecode(name)
        if folder >= 0:
            name = Path(os.readlink(f"/proc/self/fd/{folder}"), name)  # noqa: PTH115
        path = os.path.abspath(name)  # noqa: PTH100
        return f"{path}/".startswith(allowed) or path.startswith(("/dev/", "/proc/self/"))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            name, _, flags = arguments
            if isinstance(name, int) or name is None:
                return
            if flags & WRITING and not may_write(name):
                record(f"writes {name!r}")
            if os.path.realpath(os.fsdecode(name)) == canary:
                record("opens the canary")
        elif event in STARTS and not _is_of_the_stack(event):
            record(f"{event} {arguments!r:.200}")
        elif event in ("os.remove", "os.rmdir"):
            if not may_write(*arguments):
                record(f"{event} {arguments!r:.200}")
        elif event in CHANGES:
            names = [name for name in arguments[:2] if isinstance(name, str | bytes | os.PathLike)]
            if not all(map(may_write, names)):
                record(f"{event} {arguments!r:.200}")
        elif event == "socket.connect":
            if not str(arguments[1]).startswith(("('127.", "('::1'", "('localhost'")):
                record(f"connects to {arguments[1]!r}")
        elif event == "ctypes.dlopen" and str(arguments[0]).startswith(str(sandbox.folder)):
            record(f"loads {arguments[0]!r}")
        elif event == "exec" and (module := Path(arguments[0].co_filename).stem) in bait:
            record(f"imports {module}")

    sys.addaudithook(hook)


def _is_of_the_stack(event: str) -> bool:
    """Whether the standard library makes code objects or unmarshals by itself, as imports do."""
    if event not in ("code.__new__", "marshal.loads"):
        return False
    frame = sys._getframe(2)
    return "importlib" in frame.f_code.co_filename or "dataclasses" in frame.f_code.co_filename


def _recorder(sandbox: Sandbox) -> Callable[[str], None]:
    """A function that writes down a crime; it opens no file, which would be one."""
    descriptor = os.open(sandbox.audit, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def record(crime: str) -> None:
        os.write(descriptor, crime.replace("\n", "\\n").encode(errors="replace") + b"\n")

    return record


def _watch_attributes(watched: list[Any], record: Callable[[str], None]) -> None:
    """Records, when this process ends, which classes and modules have got other attributes.

    A pickle's BUILD can overwrite an attribute of a class that it may name.
    """
    before = [(one, dict(_attributes(one))) for one in watched]
    original = os._exit

    def end(status: int) -> None:
        for one, old in before:
            after = _attributes(one)
            changed = [name for name, value in old.items() if after.get(name) is not value]
            new = [name for name in after if name not in old and not name.startswith("__")]
            for name in changed + new:
                record(f"overwrites {one.__name__}.{name}")
        original(status)

    os._exit = end  # type: ignore[assignment]


def at_hand() -> list[Any]:
    """What the pickles of a checkpoint, or careless readers, have at hand."""
    import builtins
    import collections
    import io
    import pathlib

    import torch
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from torch.distributed.checkpoint import filesystem, metadata

    classes = [
        one
        for module in (pathlib, metadata)
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == module.__name__
    ]
    classes += [collections.OrderedDict, io.BytesIO, filesystem._StorageInfo, torch.Size]
    return [*classes, strategies.MCoreMetadata, strategies.MCoreSavePlan, builtins, os]


def _attributes(one: Any) -> dict[str, Any]:
    passing = ("_abc_impl", "__abstractmethods__", "__annotations__", "_exit", "_")
    return {name: value for name, value in vars(one).items() if name not in passing}
