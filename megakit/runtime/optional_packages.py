"""Installs stand-ins for parts that NeMo and Megatron use and that are absent.

NeMo's strategy imports helpers at run time. The packages of these helpers (`nemo.collections.llm`
with ModelOpt, `nemo_run`) require over 150 other packages. For a model that is not quantised or
distilled, the helpers would do nothing, and stand-ins for absent helpers also do nothing. Installed
packages, as in NVIDIA's containers, are used.
"""

import functools
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from megakit.runtime.deferred import import_torchmetrics
from megakit.runtime.patching import patch, require_attribute


def _install(name: str, **attributes: Any) -> None:
    """Installs a module with the given attributes, unless `name` is already imported."""
    module = ModuleType(name, doc="Stand-in for an optional part that is not installed.")
    vars(module).update(attributes)
    sys.modules.setdefault(name, module)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


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


def replace_modules() -> None:
    """Installs modules in the place of those whose packages are absent."""
    if not _is_installed("modelopt"):  # NeMo calls these helpers at every save, load and step
        helpers = "nemo.collections.llm.modelopt"
        for name, functions in (
            (helpers, ("set_modelopt_spec_if_exists_in_ckpt",)),
            (f"{helpers}.model_utils", ("save_modelopt_state", "restore_modelopt_state")),
            (f"{helpers}.distill.utils", ("get_tensor_shapes_adjust_fn_for_distillation",)),
        ):
            _install(name, **dict.fromkeys(functions, _do_nothing))
    if not _is_installed("pandas"):  # AutoResume imports all loggers, and one imports pandas
        logger = "nemo.utils.loggers.clearml_logger"
        _install(logger, ClearMLLogger=object, ClearMLParams=object)


def define_numpy_product() -> None:
    """Defines `numpy.product`, which numpy 2 removed; Megatron calls it when several ranks save."""
    import numpy

    vars(numpy).setdefault("product", numpy.prod)


def patch_nemo() -> None:
    """Imports NeMo, and removes its calls of packages that are absent."""
    logger = importlib.import_module("nemo.lightning.nemo_logger")
    if not require_attribute(logger, "HAVE_RES"):
        # NeMoLogger compares callbacks with a class of nvidia-resiliency-ext.
        absent = SimpleNamespace(LocalCheckpointCallback=type("LocalCheckpointCallback", (), {}))
        patch(logger, "lcp", absent)
    if not _is_installed("nemo_run"):
        # Otherwise ModelCheckpoint warns at every save that it cannot copy `io.json` as YAML.
        mixin = require_attribute("nemo.lightning.io.mixin", "IOMixin")
        patch(mixin, "_io_dump_yaml", lambda self, io, attrs: {})
    # OneLogger's telemetry turns itself on if RANK=0 is set, and fails at the first checkpoint.
    group = require_attribute("nemo.lightning.callback_group", "CallbackGroup").get_instance()
    require_attribute(group, "_callbacks").clear()


@functools.cache
def install_stand_ins() -> None:
    """Installs the stand-ins for all absent packages; imports NeMo."""
    import_torchmetrics()
    replace_unified_memory()
    replace_modules()
    define_numpy_product()
    patch_nemo()
