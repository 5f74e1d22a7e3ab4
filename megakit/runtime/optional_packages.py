"""Installs stand-ins for parts that NeMo and Megatron use and that are absent.

NeMo's strategy imports helpers at run time. The packages of these helpers (`nemo.collections.llm`
with ModelOpt, `nemo_run`) require over 150 other packages. For a model that is not quantised or
distilled, the helpers would do nothing, and stand-ins for absent helpers also do nothing. Installed
packages, as in NVIDIA's containers, are used.
"""

import importlib.util
from types import SimpleNamespace
from typing import Any

from megakit.runtime.patching import patch, record, require_attribute, stand_in


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


def replace_unified_memory() -> None:
    """Skips a CUDA helper of Megatron's inference engine, which is not used here."""
    stand_in(
        "megatron.core.inference.unified_memory",
        {
            "has_unified_memory": False,
            "create_unified_mempool": _do_nothing,
            "UnifiedMemoryUnsupportedError": RuntimeError,  # of megatron-core 0.19
        },
        group="needed",
        reason="its import compiles a CUDA helper, which fails with a CUDA compiler but no GPU",
    )


def replace_modules() -> None:
    """Installs modules in the place of those whose packages are absent."""
    if not _is_installed("modelopt"):
        helpers = "nemo.collections.llm.modelopt"
        for name, functions in (
            (helpers, ("set_modelopt_spec_if_exists_in_ckpt",)),
            (f"{helpers}.model_utils", ("save_modelopt_state", "restore_modelopt_state")),
            (f"{helpers}.distill.utils", ("get_tensor_shapes_adjust_fn_for_distillation",)),
        ):
            stand_in(
                name,
                dict.fromkeys(functions, _do_nothing),
                group="needed",
                reason="NeMo's strategy calls these helpers for quantized and distilled models",
                when="without ModelOpt",
            )
    if not _is_installed("pandas"):
        stand_in(
            "nemo.utils.loggers.clearml_logger",
            {"ClearMLLogger": object, "ClearMLParams": object},
            group="needed",
            reason="NeMo imports all loggers, and this one imports pandas",
            when="without pandas",
        )


def define_numpy_product() -> None:
    """Defines `numpy.product` again."""
    import numpy

    reason = "numpy 2 removed it, and Megatron calls it when several ranks save"
    record("numpy", "product", group="needed", reason=reason, when="with numpy 2")
    vars(numpy).setdefault("product", numpy.prod)


def patch_nemo() -> None:
    """Imports NeMo, and removes its calls of packages that are absent."""
    logger = importlib.import_module("nemo.lightning.nemo_logger")
    if not require_attribute(logger, "HAVE_RES"):
        patch(
            logger,
            "lcp",
            SimpleNamespace(LocalCheckpointCallback=type("LocalCheckpointCallback", (), {})),
            group="needed",
            reason="NeMoLogger compares callbacks with a class of nvidia-resiliency-ext",
            when="without nvidia-resiliency-ext",
        )
    if not _is_installed("nemo_run"):
        patch(
            require_attribute("nemo.lightning.io.mixin", "IOMixin"),
            "_io_dump_yaml",
            lambda self, io, attrs: {},
            group="needed",
            reason="each save of a context imports nemo_run, also if there is no YAML to write",
            when="without nemo_run",
        )
    callbacks = require_attribute("nemo.lightning.callback_group", "CallbackGroup")
    reason = "NeMo's telemetry turns itself on if RANK=0 is set, and fails at the first checkpoint"
    record(f"{callbacks.__module__}.CallbackGroup", "callbacks", group="needed", reason=reason)
    require_attribute(callbacks.get_instance(), "_callbacks").clear()
