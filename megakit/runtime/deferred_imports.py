"""Makes imports faster: no garbage collection, and no packages that this program does not use.

Lightning imports torchmetrics, which imports `scipy.signal`, torchvision and matplotlib for audio,
images and plots. During the import of torchmetrics, stand-ins replace these packages; the first use
of an attribute imports the real package.
"""

import contextlib
import gc
import pkgutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megakit.runtime.patching import record

NAMES: tuple[str, ...] = (
    "scipy.signal",
    *("matplotlib", "matplotlib.axes", "matplotlib.colors", "matplotlib.pyplot"),
    *("torchvision", "torchvision.models", "torchvision.ops", "torchvision.transforms"),
)


def suspend_collector() -> None:
    """Turns garbage collection off during imports, whose million objects remain: saves a second."""
    gc.disable()


def resume_collector() -> None:
    """Turns garbage collection on after the imports, but never for objects that exist by then."""
    gc.freeze()
    gc.enable()


class _Deferred(ModuleType):
    """A stand-in for a module of `NAMES`, or for an attribute of one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # marks a package; only its submodules in NAMES can be imported
        # transformers, which torchmetrics imports, calls `find_spec`: it refuses a missing spec.
        self.__spec__ = ModuleSpec(name, loader=None, is_package=True)

    def _real(self) -> Any:
        return pkgutil.resolve_name(self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `typing` reads such attributes of annotations
            raise AttributeError(name)
        if self.__name__ in NAMES:
            return _Deferred(f"{self.__name__}.{name}")
        return getattr(self._real(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._real())

    @contextlib.contextmanager
    def context(self, *args: Any) -> Iterator[None]:
        """Works like `pyplot.style.context`, with which torchmetrics decorates its plots."""
        with self._real().context(*args):
            yield


def import_torchmetrics() -> None:
    """Imports torchmetrics without the packages of metrics that are not used here."""
    # A stand-in beside an imported package of the same name would be no attribute of that package.
    absent = [name for name in NAMES if name.partition(".")[0] not in sys.modules]
    if not record(
        "torchmetrics",
        "imports of scipy.signal, torchvision, matplotlib",
        group="fast",
        reason="torchmetrics imports them for metrics of audio and images, and for plots",
        worth="2 s of 7 s of imports",
    ):
        absent = []
    sys.modules.update({name: _Deferred(name) for name in absent})
    try:
        import torchmetrics  # noqa: F401
    finally:
        for name in absent:
            del sys.modules[name]
