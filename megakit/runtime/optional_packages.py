"""Installs stand-ins for optional parts of NeMo and Megatron that are absent.

NeMo's strategy imports helpers at run time. The packages of these helpers (`nemo.collections.llm`
with ModelOpt, `nemo_run`) require over 150 other packages. For a model that is not quantised or
distilled, the helpers would do nothing, and stand-ins for absent helpers also do nothing. Installed
packages, as in NVIDIA's containers, are used.
"""

import functools
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from megakit.runtime.deferred import import_torchmetrics


def _install(name: str, **attributes: Any) -> None:
    """Installs a module with the given attributes, unless `name` is already imported."""
    module = ModuleType(name, doc="Stand-in for an optional part that is not installed.")
    vars(module).update(attributes)
    sys.modules.setdefault(name, module)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def without_modelopt() -> None:
    """Replaces NeMo's helpers for ModelOpt with functions that do nothing.

    NeMo calls these helpers at every save, load and step. Only the helpers' modules are replaced,
    so `nemo.collections.llm` itself does not change.
    """
    if importlib.util.find_spec("modelopt") is not None:
        return
    helpers = "nemo.collections.llm.modelopt"
    _install(helpers, set_modelopt_spec_if_exists_in_ckpt=_nothing)
    _install(
        f"{helpers}.model_utils",
        save_modelopt_state=_nothing,
        restore_modelopt_state=_nothing,
    )
    _install(f"{helpers}.distill.utils", get_tensor_shapes_adjust_fn_for_distillation=_nothing)


def without_nemo_run() -> None:
    """Skips the YAML copy of a checkpoint's context, for which NeMo needs nemo_run (80 packages).

    `io.json` has the same content. Without this patch, NeMo's ModelCheckpoint warns at every save.
    """
    if importlib.util.find_spec("nemo_run") is not None:
        return
    from nemo.lightning.io.mixin import IOMixin

    IOMixin._io_dump_yaml = lambda self, io, attrs: {}


class _ClearMLLogger:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ImportError("NeMo's ClearMLLogger needs pandas, which is not installed.")


@dataclass
class _ClearMLParams:
    """A stand-in for the options of NeMo's ClearMLLogger, without any option."""


def without_pandas() -> None:
    """Replaces NeMo's ClearMLLogger, which imports pandas; AutoResume imports all loggers."""
    if importlib.util.find_spec("pandas") is not None:
        return
    _install(
        "nemo.utils.loggers.clearml_logger",
        ClearMLLogger=_ClearMLLogger,
        ClearMLParams=_ClearMLParams,
    )


class _LocalCheckpointCallback:
    """A class of which no callback is an instance."""


def without_resiliency_extension() -> None:
    """Defines a class of nvidia-resiliency-ext that NeMoLogger compares callbacks with."""
    from nemo.lightning import nemo_logger

    if not nemo_logger.HAVE_RES:
        nemo_logger.lcp = SimpleNamespace(LocalCheckpointCallback=_LocalCheckpointCallback)


def without_unified_memory() -> None:
    """Skips a CUDA helper of Megatron's inference engine, which is not used here.

    The import of the engine compiles the helper, which takes over a second. With a CUDA compiler
    but no GPU, this compilation fails.
    """
    _install(
        "megatron.core.inference.unified_memory",
        has_unified_memory=False,
        create_unified_mempool=_nothing,
    )


def without_telemetry() -> None:
    """Removes the callbacks of NeMo's OneLogger telemetry.

    OneLogger turns itself on if `RANK=0` is set, and then fails at the first checkpoint.
    """
    from nemo.lightning.callback_group import CallbackGroup

    CallbackGroup.get_instance()._callbacks.clear()


@functools.cache
def install_stand_ins() -> None:
    """Installs the stand-ins for all absent packages; imports NeMo."""
    import_torchmetrics()
    without_modelopt()
    without_pandas()
    without_unified_memory()
    without_nemo_run()
    without_resiliency_extension()
    without_telemetry()
