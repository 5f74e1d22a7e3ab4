"""Running scripts that have to refuse: they end with status 2, say why, and change nothing.

A script runs as a fork of the process that runs the tests, which saves the start of Python. The
fork imports the project's modules again. None of them may import a framework: the trap ends it.
"""

import gc
import importlib
import importlib.abc
import logging
import os
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megakit.errors import UserError
from tests.scripts import REPOSITORY, Result, environment

PRETRAIN_PY, FINETUNE_PY, PREDICT_PY = "model_pretrain.py", "model_finetune.py", "model_predict.py"
FRAMEWORKS = ("torch", "nemo", "lightning", "megatron", "torchvision", "fiddle")
OURS = ("megakit", "mnist", "examples")
TRAPPED = 97
HANGS_AFTER = 60  # seconds

CLOSED_PROXY = "http://127.0.0.1:9"


class Trap(importlib.abc.MetaPathFinder):
    """Ends the process at the import of a framework, also where the program would go on."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in FRAMEWORKS:
            traceback.print_stack()
            sys.stderr.flush()
            os._exit(TRAPPED)


def run_forked(
    script: str | Path, *arguments: object, folder: Path, cwd: Path, **changes: str | None
) -> Result:
    """Runs a script to its end in a fork; `folder` gets what it prints."""
    streams = {1: folder / "stdout", 2: folder / "stderr"}
    child = os.fork()
    if child == 0:
        try:
            _become(script, [*map(str, arguments)], streams, cwd, environment(**changes))
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out, err = (path.read_text() for path in streams.values())
    return Result(status, out, err)


def _become(script, arguments, streams, cwd, variables) -> NoReturn:
    gc.disable()  # to collect inherited objects may wait for threads that only the parent has
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HANGS_AFTER)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in streams.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    importlib.reload(warnings)  # pytest records warnings and what is logged
    logging.root.handlers.clear()
    for name in [*sys.modules]:
        root = name.partition(".")[0]
        if root in (*OURS, *FRAMEWORKS) or root.startswith("model_"):
            del sys.modules[name]
    sys.meta_path.insert(0, Trap())
    path = REPOSITORY / script
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.parent)
    sys.path.insert(1, str(REPOSITORY))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


@dataclass
class Refusals:
    """Runs scripts that have to refuse, below one folder in which nothing may change."""

    folder: Path
    printed: Path

    def __call__(self, script: str, *arguments: object, **changes: str) -> str:
        """What a script says, without its name; all else that a refusal promises is checked."""
        before = snapshot(self.folder)
        given = ["--output-dir", self.folder / "runs", "--data-dir", self.folder / "data"]
        given += arguments
        for option, value in (("--dataset", "digits"), ("--accelerator", "cpu")):
            if option not in given:
                given += [option, value]
        variables = {"COLUMNS": "80", "https_proxy": CLOSED_PROXY, "HTTPS_PROXY": CLOSED_PROXY}
        result = run_forked(
            script, *given, folder=self.printed, cwd=self.folder, **(variables | changes)
        )
        assert result.status == 2, result.err
        assert result.out == ""
        assert "Traceback" not in result.err
        assert snapshot(self.folder) == before
        return result.err

    def problems(self, script: str, *arguments: object, **changes: str) -> list[str]:
        """The messages, each on one line that begins with the script's name."""
        lines = self(script, *arguments, **changes).splitlines()
        for line in lines:
            assert line.startswith(f"{Path(script).name}: ")
            # short, apart from the paths in it
            assert len(line.replace(str(self.folder), "")) < 500
        return [line.removeprefix(f"{Path(script).name}: ") for line in lines]

    def problem(self, script: str, *arguments: object, **changes: str) -> str:
        (problem,) = self.problems(script, *arguments, **changes)
        return problem


def snapshot(folder: Path) -> dict[Path, Any]:
    """All that lies below a folder, and each file's content and time, except for locks.

    A new lock changes the time of its folder.
    """

    def entries() -> Iterator[tuple[Path, Any]]:
        for path in {folder, *folder.rglob("*")} - {*folder.rglob(".lock")}:
            is_file = path.is_file()
            yield path, (path.stat().st_mtime_ns, path.read_bytes()) if is_file else None

    return dict(entries())


def problems(function: Callable[..., object], *arguments: object, **options: object) -> list[str]:
    """The problems with which a call is refused, each one printable line."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    for problem in caught.value.problems:
        assert len(problem.splitlines()) == 1
        assert problem.isprintable()
    return caught.value.problems


def problem(function: Callable[..., object], *arguments: object, **options: object) -> str:
    (only,) = problems(function, *arguments, **options)
    return only
