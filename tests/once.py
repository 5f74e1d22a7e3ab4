"""What is made once for all tests, though pytest-xdist runs them in several processes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.scripts import Result, run_script


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Returns a folder that the first process to ask for it fills by calling `make`.

    The folder serves all tests of the machine: read it, or change a copy.
    """
    own = factory.getbasetemp()
    root = own.parent if own.name.startswith("popen-") else own  # a worker has a folder in it
    folder, made, failed = (root / f"{name}{end}" for end in ("", ".made", ".failed"))
    with FileLock(root / f"{name}.lock"):
        if failed.exists():
            raise RuntimeError(f"{name} could not be made before: {failed.read_text()}")
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            folder.mkdir()
            try:
                make(folder)
            except BaseException as error:
                failed.write_text(str(error))
                raise
            made.touch()
    return folder


@dataclass(frozen=True)
class Chain:
    """What `./run tutorial` left behind and said; it is to be read, not to be changed."""

    runs: Path
    result: Result


def trained_chain(factory: pytest.TempPathFactory) -> Chain:
    """Runs the tutorial, unless another process of the tests has run it."""

    def make(folder: Path) -> None:
        options = ("--data-dir", folder / "no-data", "--output-dir", folder / "runs")
        result = run_script("mnist/tutorial.py", "--dataset", "digits", *options)
        assert result.status == 0, result.err
        (folder / "result.json").write_text(json.dumps(asdict(result)))

    folder = once(factory, "chain", make)
    result = Result(**json.loads((folder / "result.json").read_text()))
    return Chain(folder / "runs", result)
