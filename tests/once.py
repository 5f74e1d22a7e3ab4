"""What is made once for all tests, though pytest-xdist runs them in several processes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Returns a folder that the first process to ask for it fills.

    The folder serves all tests of the machine: read it, or change a copy.

    Args:
        factory: pytest's.
        name: The folder's name.
        make: Fills the folder, which is there and empty.

    Raises:
        RuntimeError: Another process has tried before, and failed with this message.
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
