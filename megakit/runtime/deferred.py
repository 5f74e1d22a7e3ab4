"""Defers the import of large packages that torchmetrics imports and this program does not use.

Lightning imports torchmetrics, which imports `scipy.signal`, torchvision and matplotlib for audio,
images and plots: a fifth of the start of a script. During the import of torchmetrics, stand-ins
replace these packages. Their attributes import the real package when they are first used.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES: tuple[str, ...] = (
    "scipy.signal",
    *("matplotlib", "matplotlib.axes", "matplotlib.colors", "matplotlib.pyplot"),
    *("torchvision", "torchvision.models", "torchvision.ops", "torchvision.transforms"),
)


class _DeferredAttribute:
    """An attribute of a module; a call or attribute access imports the module."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def _real(self) -> Any:
        return getattr(importlib.import_module(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def context(self, *args: Any) -> Callable[[Callable], Callable]:
        """Works like `pyplot.style.context`, with which torchmetrics decorates its plots."""

        def decorate(plot: Callable) -> Callable:
            @functools.wraps(plot)
            def styled(*inputs: Any, **options: Any) -> Any:
                with self._real().context(*args):
                    return plot(*inputs, **options)

            return styled

        return decorate

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # `typing` reads such attributes of annotations
        return getattr(self._real(), name)


class _DeferredModule(ModuleType):
    """A stand-in module; the use of one of its attributes imports the real module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # marks a package; only its submodules in NAMES can be imported
        # torchmetrics imports transformers where it is installed, and transformers calls
        # `importlib.util.find_spec`, which raises a ValueError for a loaded module without a spec.
        self.__spec__ = ModuleSpec(name, loader=None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _DeferredAttribute(self.__name__, name)


@functools.cache
def import_torchmetrics() -> None:
    """Imports torchmetrics without the packages of metrics that are not used here."""
    if "torchmetrics" in sys.modules:
        return
    # An import sets a submodule as an attribute of its package only if it loads the real submodule.
    loaded = {name for name in NAMES if name in sys.modules}
    absent = [name for name in NAMES if not {name, name.partition(".")[0]} & loaded]
    sys.modules.update({name: _DeferredModule(name) for name in absent})
    try:
        import torchmetrics  # noqa: F401
    finally:
        for name in absent:
            del sys.modules[name]
