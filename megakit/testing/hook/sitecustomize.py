"""Rehearses GPUs in every Python process that has this folder on PYTHONPATH and REHEARSE_GPUS set.

    PYTHONPATH=megakit/testing/hook REHEARSE_GPUS=2 python model_pretrain.py --accelerator gpu

Python imports a module of this name before anything else.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run_next() -> None:
    """Runs the next `sitecustomize` on the search path, which this one hides."""
    own = [Path(entry).resolve() for entry in sys.path].index(_HERE)
    spec = PathFinder.find_spec("sitecustomize", sys.path[own + 1 :])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# A Python without torch, such as the system's in a shell script, has nothing to rehearse.
if "REHEARSE_GPUS" in os.environ and importlib.util.find_spec("torch") is not None:
    sys.path.append(str(_HERE.parents[2]))  # the folder of `megakit`
    try:
        from megakit.testing.rehearsal.rehearse import rehearse_when_asked

        rehearse_when_asked()
    finally:
        sys.path.pop()
_run_next()
