"""Stand-ins for optional parts of NeMo and Megatron that are not installed.

NeMo's strategy imports helpers at run time whose packages (`nemo.collections.llm` with ModelOpt,
`nemo_run`) bring over 150 others. Where they are absent, doing nothing is what they would do for a
model that is not quantised or distilled; where they are installed, as in NVIDIA's containers, the
real ones are used.
"""

import functools
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from megakit.runtime.deferred import import_torchmetrics


def _install(name: str, **attributes: Any) -> None:
    """Puts a module of the given attributes where `import name` finds it."""
    module = ModuleType(name, doc="Stand-in for an optional part that is not installed.")
    vars(module).update(attributes)
    sys.modules.setdefault(name, module)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def without_modelopt() -> None:
    """NeMo asks ModelOpt for its state at every save and load, and for tensor shapes at every step.

    Only the leaves are put in place, so `nemo.collections.llm` itself stays what it is.
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
    """NeMo writes a yaml copy of a checkpoint's context with nemo_run's serialiser (80 packages).

    `io.json` holds the same; without this, NeMo's ModelCheckpoint warns at every save.
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
    """Its options; none, without it."""


def without_pandas() -> None:
    """NeMo's AutoResume imports all of NeMo's loggers, and the one for ClearML imports pandas."""
    if importlib.util.find_spec("pandas") is not None:
        return
    _install(
        "nemo.utils.loggers.clearml_logger",
        ClearMLLogger=_ClearMLLogger,
        ClearMLParams=_ClearMLParams,
    )


class _LocalCheckpointCallback:
    """What no callback is an instance of."""


def without_resiliency_extension() -> None:
    """NeMoLogger asks whether a checkpoint callback is the local one of nvidia-resiliency-ext."""
    from nemo.lightning import nemo_logger

    if not nemo_logger.HAVE_RES:
        nemo_logger.lcp = SimpleNamespace(LocalCheckpointCallback=_LocalCheckpointCallback)


def without_unified_memory() -> None:
    """Megatron's inference engine compiles a CUDA helper when imported, which takes over a second.

    With a CUDA compiler but no GPU that compilation dies. Nothing here infers through that engine.
    """
    _install(
        "megatron.core.inference.unified_memory",
        has_unified_memory=False,
        create_unified_mempool=_nothing,
    )


def without_telemetry() -> None:
    """NeMo's OneLogger turns itself on under `RANK=0` and then fails at the first checkpoint."""
    from nemo.lightning.callback_group import CallbackGroup

    CallbackGroup.get_instance()._callbacks.clear()


@functools.cache
def install_stand_ins() -> None:
    """Installs every stand-in whose original is absent; imports NeMo."""
    import_torchmetrics()
    without_modelopt()
    without_pandas()
    without_unified_memory()
    without_nemo_run()
    without_resiliency_extension()
    without_telemetry()
