"""Makes a script fail at one exact moment: just before the n-th call of some function.

Python imports a module of this name in every process before anything else. The moment is in the
environment: `FAULT="MODULE:FUNCTION:N FAULT RANK"`, the fault being a signal, or an exception to
raise. Just before the fault, the file named by `FAULT_CAME`, if any, is made.
"""

import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import operator
import os
import signal
import sys
from collections.abc import Callable
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


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with one module, once this is imported."""

    def __init__(self, name: str, call: Callable[[Any], None]) -> None:
        self.name, self.call = name, call

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), self.call(module))
        return spec


run_the_next()
if "FAULT" in os.environ:
    moment, fault, rank = os.environ["FAULT"].split()
    module, function, count = moment.split(":")
    if os.environ.get("RANK", "0") == rank:
        fail = functools.partial(fail_at, function, int(count), fault)
        sys.meta_path.insert(0, AfterImport(module, fail))
