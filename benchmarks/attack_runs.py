"""Runs one script on one mutated checkpoint in a fork, under watch, and judges how it ended."""

import ctypes
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from attack_watch import Sandbox, at_hand, watch
from report import REPOSITORY

from megakit.job.launch import end_fork

#: No script may take longer on a mutated checkpoint.
SECONDS = 60.0
#: Address space that a script gets on top of what the imported stack uses.
BYTES = 6 << 30
#: Resident memory that a script may use on top of what the imported stack uses.
RESIDENT_BYTES = 2 << 30


@dataclass
class End:
    """How a run ended.

    Attributes:
        status: Exit status as a shell gives it; None where it had to be killed after `SECONDS`.
        err: Standard error.
        log: Every log.txt below the output directory.
        crimes: What the audit hook recorded.
        seconds: How long it took.
        peak: Resident memory at its highest, in bytes.
    """

    status: int | None
    err: str
    log: str
    crimes: list[str]
    seconds: float
    peak: int


def start(
    script: str, arguments: list[str], sandbox: Sandbox, changes: Mapping[str, str] | None = None
) -> int:
    """Forks and runs a script as `python SCRIPT ARGUMENTS` would.

    Args:
        script: Which one.
        arguments: Its command line.
        sandbox: Its folder.
        changes: To its environment.

    Returns:
        The process id.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        end_fork(lambda: _run(script, arguments, sandbox, changes or {}))
    return child


def _run(script: str, arguments: list[str], sandbox: Sandbox, changes: Mapping[str, str]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
    _lead_output(sandbox)
    os.environ.update(changes)
    os.environ["TMPDIR"] = tempfile.tempdir = str(sandbox.folder / "tmp")
    limit = _status_bytes("VmSize") + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watch(sandbox, at_hand())
    path = str(REPOSITORY / script)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def _lead_output(sandbox: Sandbox) -> None:
    (sandbox.folder / "tmp").mkdir(exist_ok=True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    err = os.open(sandbox.err, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    out = os.open(sandbox.folder / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, descriptor in enumerate((nothing, out, err)):
        os.dup2(descriptor, number)


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{name}:\s+(\d+) kB", text)
    assert match is not None
    return int(match[1]) * 1024


def finish(process: int, began: float, sandbox: Sandbox) -> End | None:
    """How a run ended, or None while it goes on; kills it after `SECONDS`."""
    late = time.monotonic() - began > SECONDS
    if late:
        os.kill(process, signal.SIGKILL)
    ended, status, usage = os.wait4(process, 0 if late else os.WNOHANG)
    if not ended:
        return None
    code = os.waitstatus_to_exitcode(status)
    logs = [path for path in sandbox.out.glob("*/log.txt") if path.is_file()]
    return End(
        status=None if late else code if code >= 0 else 128 - code,
        err=_text(sandbox.err),
        log="".join(map(_text, logs)),
        crimes=_text(sandbox.audit).splitlines() + ["runs a payload"] * sandbox.trace.exists(),
        seconds=time.monotonic() - began,
        peak=usage.ru_maxrss * 1024,
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def problems(end: End, script: str, result: Callable[[], str | None]) -> list[str]:
    """What is wrong with how a run on a mutated checkpoint ended; nothing if the list is empty.

    Args:
        end: How it ended.
        script: Which one it was.
        result: Says what is wrong with the result of a run that ended with status 0.
    """
    found = [f"crime: {crime}" for crime in dict.fromkeys(end.crimes)]
    if end.status is None:
        found.append(f"did not end within {SECONDS:.0f} s")
    elif end.status not in (0, 2):
        found.append(f"status {end.status}")
    if end.peak > _status_bytes("VmRSS") + RESIDENT_BYTES:
        found.append(f"used {end.peak / 1e9:.1f} GB")
    if "Traceback (most recent" in end.err + end.log:
        found.append("traceback")
    if strange := re.search(r"[\x00-\x08\x0b-\x1f\x7f]", end.err):
        found.append(f"control character {strange[0]!r} on standard error")
    if end.status == 2 and not _has_message(end.err, script):
        found.append("no message, or one too long")
    if end.status == 0 and not found and (wrong := result()):
        found.append(wrong)
    return found


def _has_message(err: str, script: str) -> bool:
    """Whether the script says what is wrong, in lines short enough to be read."""
    lines = err.splitlines()
    says = any(line.startswith(f"{script}: ") for line in lines)
    return says and max(map(len, lines)) < 4000 and len(lines) < 100


def remove(folder: Path) -> None:
    """Removes the folder of a run, whatever the mutation left in it."""
    shutil.rmtree(folder, ignore_errors=True)
