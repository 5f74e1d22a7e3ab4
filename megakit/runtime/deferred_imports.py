"""Makes imports faster: no garbage collection, and no packages that this program does not use.

Lightning imports torchmetrics, which imports `scipy.signal`, torchvision and matplotlib for audio,
images and plots. For a class, Lightning imports torch's compiler, and Megatron torch's distributed
tensors. NeMo imports what exports and downloads models. During the imports, stand-ins replace these
packages; the first use of an attribute imports the real package.
"""

import contextlib
import functools
import gc
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Union

from megakit.runtime.patching import patch, record

#: The packages that stand-ins replace, with their modules.
PACKAGES = (
    *("scipy.signal", "matplotlib", "torchvision"),
    *("torch._dynamo", "torch.distributed.tensor", "torch.distributed._tensor"),
    *("huggingface_hub", "onnx", "onnxruntime"),
)


def suspend_collector() -> None:
    """Turns garbage collection off during imports, whose million objects remain: saves a second."""
    gc.disable()


def resume_collector() -> None:
    """Turns garbage collection on after the imports, but never for objects that exist by then."""
    gc.freeze()
    gc.enable()


class _Deferred(ModuleType):
    """A stand-in for a module of `PACKAGES`, or for an attribute of one."""

    @functools.cached_property
    def _real(self) -> Any:
        _withdraw(self.__name__)
        return pkgutil.resolve_name(self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `typing` reads such attributes of annotations
            raise AttributeError(name)
        if self.__spec__ or _is_deferred(self.__name__):  # only a module has a spec
            return _Deferred(f"{self.__name__}.{name}")
        return getattr(self._real, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real(*args, **kwargs)

    def __mro_entries__(self, bases: object) -> tuple[type]:
        return (self._real,)

    def __instancecheck__(self, instance: object) -> bool:
        return self.__subclasscheck__(type(instance))

    def __subclasscheck__(self, subclass: type) -> bool:
        # Before its module is imported, a class has no subclasses.
        module = sys.modules.get(self.__name__.rpartition(".")[0])
        return not isinstance(module, _Deferred | None) and issubclass(subclass, self._real)

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007  # `|` is this method

    __ror__ = __or__

    @contextlib.contextmanager
    def context(self, *args: Any) -> Iterator[None]:
        """Works like `pyplot.style.context`, with which torchmetrics decorates its plots."""
        with self._real.context(*args):
            yield


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins for the modules of `PACKAGES`."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Returns the spec of a stand-in; None for a module of another package."""
        return ModuleSpec(fullname, self, is_package=True) if _is_deferred(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns a stand-in; `torch.distributed._tensor` is an older name."""
        return _Deferred(spec.name.replace("._tensor", ".tensor"))

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing."""


#: The packages that imports find stand-ins for.
_deferred: set[str] = set()


def _is_deferred(name: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in _deferred)


def _withdraw(name: str) -> None:
    """Lets imports find the real package of a name from now on, and those beside it."""
    root = name.partition(".")[0]
    for module, one in reversed([*sys.modules.items()]):
        if isinstance(one, _Deferred) and module.partition(".")[0] == root:
            del sys.modules[module]
            parent, _, child = module.rpartition(".")
            vars(sys.modules.get(parent, one)).pop(child, None)
    _deferred.difference_update([one for one in _deferred if one.partition(".")[0] == root])


@contextlib.contextmanager
def unused_packages_deferred() -> Iterator[None]:
    """Replaces `PACKAGES` by stand-ins in the `with` block, which imports the frameworks."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    if record(
        "lightning",
        f"imports of {', '.join(PACKAGES)}",
        group="fast",
        reason="metrics of images, plots, torch.compile, DTensor and exports need them",
        worth="3 s of 7 s of imports",
    ):
        _deferred.update(PACKAGES)
    try:
        yield
    finally:
        for package in PACKAGES:
            _withdraw(package)
        sys.meta_path.remove(finder)


@functools.cache
def leave_out_compiler() -> None:
    """Lets an optimizer be used without the import of torch's compiler."""
    from torch.optim import Optimizer

    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        patch(
            Optimizer,
            name,
            inspect.unwrap(getattr(Optimizer, name)),
            group="fast",
            reason="its first call imports torch's compiler, to tell it not to compile the method",
            worth="0.4 s of a start",
        )
