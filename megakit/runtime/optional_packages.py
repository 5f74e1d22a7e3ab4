"""Installs stand-ins for parts that NeMo and Megatron use and that are absent.

NeMo's strategy imports helpers at run time. The packages of these helpers (`nemo.collections.llm`
with ModelOpt, `nemo_run`) require over 150 other packages. For a model that is not quantised or
distilled, the helpers would do nothing, and stand-ins for absent helpers also do nothing. Installed
packages, as in NVIDIA's containers, are used.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from megakit.runtime.deferred import import_torchmetrics
from megakit.runtime.patching import existing, replace


def _install(name: str, **attributes: Any) -> None:
    """Installs a module with the given attributes, unless `name` is already imported."""
    module = ModuleType(name, doc="Stand-in for an optional part that is not installed.")
    vars(module).update(attributes)
    sys.modules.setdefault(name, module)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


def replace_modelopt_helpers() -> None:
    """Replaces NeMo's helpers for ModelOpt, which NeMo calls at every save, load and step.

    Only the helpers' modules are replaced, so `nemo.collections.llm` itself does not change.
    """
    if _is_installed("modelopt"):
        return
    helpers = "nemo.collections.llm.modelopt"
    _install(helpers, set_modelopt_spec_if_exists_in_ckpt=_do_nothing)
    _install(
        f"{helpers}.model_utils",
        save_modelopt_state=_do_nothing,
        restore_modelopt_state=_do_nothing,
    )
    _install(f"{helpers}.distill.utils", get_tensor_shapes_adjust_fn_for_distillation=_do_nothing)


def skip_yaml_copy() -> None:
    """Skips the YAML copy of a checkpoint's context, for which NeMo needs nemo_run (80 packages).

    `io.json` has the same content. Without this patch, NeMo's ModelCheckpoint warns at every save.
    """
    if not _is_installed("nemo_run"):
        mixin = existing("nemo.lightning.io.mixin", "IOMixin")
        replace(mixin, "_io_dump_yaml", lambda self, io, attrs: {})


class _ClearMLLogger:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ImportError("NeMo's ClearMLLogger needs pandas, which is not installed.")


@dataclass
class _ClearMLParams:
    """A stand-in for the options of NeMo's ClearMLLogger, without any option."""


def replace_clearml_logger() -> None:
    """Replaces NeMo's ClearMLLogger, which imports pandas; AutoResume imports all loggers."""
    if not _is_installed("pandas"):
        _install(
            "nemo.utils.loggers.clearml_logger",
            ClearMLLogger=_ClearMLLogger,
            ClearMLParams=_ClearMLParams,
        )


def define_local_checkpoint_callback() -> None:
    """Defines a class of nvidia-resiliency-ext that NeMoLogger compares callbacks with."""
    if not existing("nemo.lightning.nemo_logger", "HAVE_RES"):
        no_callback = type("LocalCheckpointCallback", (), {})
        module = sys.modules["nemo.lightning.nemo_logger"]
        replace(module, "lcp", SimpleNamespace(LocalCheckpointCallback=no_callback))


def replace_unified_memory() -> None:
    """Skips a CUDA helper of Megatron's inference engine, which is not used here.

    The import of the engine compiles the helper, which takes over a second. With a CUDA compiler
    but no GPU, this compilation fails.
    """
    _install(
        "megatron.core.inference.unified_memory",
        has_unified_memory=False,
        create_unified_mempool=_do_nothing,
    )


def define_numpy_product() -> None:
    """Defines `numpy.product`, which numpy 2 removed; Megatron calls it when several ranks save."""
    import numpy

    if not hasattr(numpy, "product"):
        vars(numpy)["product"] = numpy.prod


@contextlib.contextmanager
def hidden_onnxruntime() -> Iterator[None]:
    """Hides onnxruntime, which NeMo imports for its own exports wherever it is installed.

    These exports are not used here, and the import ends the process on an emulated aarch64 machine.
    """
    if "onnxruntime" in sys.modules:
        yield
        return
    sys.modules["onnxruntime"] = None  # type: ignore[assignment]  # an import then fails
    try:
        yield
    finally:
        del sys.modules["onnxruntime"]


def remove_telemetry_callbacks() -> None:
    """Removes the callbacks of NeMo's OneLogger telemetry.

    OneLogger turns itself on if `RANK=0` is set, and then fails at the first checkpoint.
    """
    group = existing("nemo.lightning.callback_group", "CallbackGroup").get_instance()
    existing(group, "_callbacks").clear()


@functools.cache
def install_stand_ins() -> None:
    """Installs the stand-ins for all absent packages; imports NeMo."""
    import_torchmetrics()
    replace_modelopt_helpers()
    replace_clearml_logger()
    replace_unified_memory()
    define_numpy_product()
    with hidden_onnxruntime():
        skip_yaml_copy()
        define_local_checkpoint_callback()
        remove_telemetry_callbacks()
