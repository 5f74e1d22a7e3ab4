"""Heavy modules that are imported for a name which nobody here uses.

Lightning imports torchmetrics, whose audio metrics import `scipy.signal`, whose image metrics
import torchvision and whose plots import matplotlib: together a third of the start of a script.
While torchmetrics is imported, these are stood in for by modules whose contents are imported when
they are first used; afterwards `import torchvision` is what it always was.
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
    """A module's attribute, imported when it is called or asked for something.

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
        """As `pyplot.style.context`, with which torchmetrics decorates its plots."""

        def decorate(plot: Callable) -> Callable:
            @functools.wraps(plot)
            def styled(*inputs: Any, **options: Any) -> Any:
                with self._real().context(*args):
                    return plot(*inputs, **options)

            return styled

        return decorate

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # `typing` asks for those in annotations
        return getattr(self._real(), name)


class _Deferred(ModuleType):
    """A module that holds whatever it is asked for, for later."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package, of which only what is in NAMES can be imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Later(self.__name__, name)


@functools.cache
def import_torchmetrics() -> None:
    """Imports torchmetrics without the packages that it imports for metrics not used here."""
    if "torchmetrics" in sys.modules:
        return
    absent = [name for name in NAMES if name not in sys.modules]
    sys.modules.update({name: _Deferred(name) for name in absent})
    try:
        import torchmetrics  # noqa: F401
    finally:
        for name in absent:
            del sys.modules[name]
