"""A small library for training models of one's own on NeMo 2 and Megatron-Core.

Importing it loads neither torch nor NeMo; its subpackages load what is used of them.

`megakit.CACHE_DIR` is a folder for data that programs share: the environment's MEGAKIT_CACHE_DIR,
else ~/.cache/megakit.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    CACHE_DIR: Path


def __getattr__(name: str) -> Path:
    # When it is asked for, so that a program may set the variable first; nobody creates the folder.
    if name == "CACHE_DIR":
        return Path(os.environ.get("MEGAKIT_CACHE_DIR") or Path.home() / ".cache" / "megakit")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
