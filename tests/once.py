"""What is made once for all tests, though pytest-xdist runs them in several processes."""

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
    """
    own = factory.getbasetemp()
    root = own.parent if own.name.startswith("popen-") else own  # a worker has a folder in it
    folder, made = root / name, root / f"{name}.made"
    with FileLock(root / f"{name}.lock"):
        if not made.exists():
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
