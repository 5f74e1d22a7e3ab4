"""Defers the import of large packages that torchmetrics imports and this program does not use.

Lightning imports torchmetrics. The audio metrics of torchmetrics import `scipy.signal`, its image
metrics import torchvision, and its plots import matplotlib. These imports take a third of the start
of a script. While torchmetrics is imported, stand-in modules replace these packages. An attribute
of a stand-in imports the real package when the attribute is first used. After the import of
torchmetrics, `import torchvision` imports the real package.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAMES: tuple[str, ...] = (
    "scipy.signal",
    *("matplotlib", "matplotlib.axes", "matplotlib.colors", "matplotlib.pyplot"),
    *("torchvision", "torchvision.models", "torchvision.ops", "torchvision.transforms"),
)


class _Later:
    """An attribute of a module; a call or attribute access imports the module.

    Args:
        module: Name of the module.
        name: Name of the attribute.
    """

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


class _Deferred(ModuleType):
    """A stand-in module; the use of one of its attributes imports the real module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # marks a package; only its submodules in NAMES can be imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Later(self.__name__, name)


@functools.cache
def import_torchmetrics() -> None:
    """Imports torchmetrics without the packages of metrics that are not used here."""
    if "torchmetrics" in sys.modules:
        return
    absent = [name for name in NAMES if name not in sys.modules]
    sys.modules.update({name: _Deferred(name) for name in absent})
    try:
        import torchmetrics  # noqa: F401
    finally:
        for name in absent:
            del sys.modules[name]
