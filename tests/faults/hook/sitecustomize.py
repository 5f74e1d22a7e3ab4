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
import operator
import os
import signal
import sys
from pathlib import Path
from typing import Any


class FaultAt(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the one module that holds the function, and wraps the function once it is there."""

    def __init__(self, moment: str, fault: str) -> None:
        self.module, self.function, count = moment.split(":")
        self.fault, self.count = fault, int(count)
        self.loader: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        path, _, name = self.function.rpartition(".")
        owner = operator.attrgetter(path)(module) if path else module
        original, calls = getattr(owner, name), [0]

        @functools.wraps(original)
        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == self.count:
                if "FAULT_CAME" in os.environ:
                    Path(os.environ["FAULT_CAME"]).touch()
                if not self.fault.startswith("SIG"):
                    raise getattr(builtins, self.fault)("made to fail here")
                os.kill(os.getpid(), getattr(signal, self.fault))
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
    moment, fault, rank = os.environ["FAULT"].split()
    if os.environ.get("RANK", "0") == rank:
        sys.meta_path.insert(0, FaultAt(moment, fault))
