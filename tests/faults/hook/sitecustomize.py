"""Makes a script fail at one exact moment: just before the n-th call of some function.

Python imports a module of this name in every process before anything else. The moment is in the
environment: `FAULT="MODULE:FUNCTION:N FAULT RANK"`, the fault being a signal, or an exception to
raise. Just before the fault, the file named by `FAULT_CAME`, if any, is made.
"""

import builtins
import functools
import importlib.machinery
import importlib.util
import itertools
import operator
import os
import signal
import sys
from pathlib import Path
from typing import Any


def fail_at(function: str, count: int, fault: str, module: Any) -> None:
    """Wraps the function of a module that has been imported just now."""
    path, _, name = function.rpartition(".")
    owner = operator.attrgetter(path)(module) if path else module
    original, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            if "FAULT_CAME" in os.environ:
                Path(os.environ["FAULT_CAME"]).touch()
            if not fault.startswith("SIG"):
                raise getattr(builtins, fault)("made to fail here")
            os.kill(os.getpid(), getattr(signal, fault))
        return original(*args, **kwargs)

    setattr(owner, name, counting)


def run_the_next() -> None:
    """Runs the module of this name that this one hides, such as another hook's on PYTHONPATH."""
    here = Path(__file__).resolve().parent
    own = [Path(entry).resolve() for entry in sys.path].index(here)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path[own + 1 :])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


run_the_next()
if "FAULT" in os.environ:
    from wrapt import register_post_import_hook

    moment, fault, rank = os.environ["FAULT"].split()
    module, function, count = moment.split(":")
    if os.environ.get("RANK", "0") == rank:
        register_post_import_hook(functools.partial(fail_at, function, int(count), fault), module)
