"""Stand-ins for what is not installed, and nothing in the place of what is.

One process tells it all, since importing NeMo takes seconds: `use_accelerator("gpu")`, which needs
no GPU, with packages beside it that come and go.
"""

import json
from typing import Any

import pytest

from tests.scripts import output_of

OPTIONAL = ("modelopt", "nemo_run", "pandas")
STAND_INS = {
    "modelopt": "nemo.collections.llm.modelopt",
    "pandas": "nemo.utils.loggers.clearml_logger",
}

PROGRAM = """
import importlib, json, sys
from importlib.util import find_spec
from megakit.runtime import optional_packages, cpu, use_accelerator

def present(yes):
    (sys.path.insert if yes else lambda _, path: sys.path.remove(path))(0, sys.argv[1])
    importlib.invalidate_caches()

told = {"absent": [name for name in json.loads(sys.argv[2]) if find_spec(name) is None]}
present(True)
optional_packages.replace_modelopt_helpers()
optional_packages.replace_clearml_logger()
told["where present"] = [name for name in sys.modules if name.startswith("nemo.")]
present(False)

import numpy
vars(numpy).pop("product", None)  # as in numpy 2
import torch
names = ("current_device", "manual_seed", "Stream", "memory_allocated")
functions = [*(getattr(torch.cuda, name) for name in names), torch.Tensor.to, torch.zeros]
use_accelerator("gpu")
after = [*(getattr(torch.cuda, name) for name in names), torch.Tensor.to, torch.zeros]
told["not imported"] = [name for name in ("matplotlib", "scipy.signal", "torchvision")
                        if name not in sys.modules]
from megatron.core.inference.unified_memory import has_unified_memory
from megatron.core.jit import jit_fuser
told["torch is untouched"] = functions == after and cpu.patch_torch.cache_info().misses == 0
told["Megatron is untouched"] = jit_fuser is torch.compile
told["unified memory"] = has_unified_memory
told["onnxruntime is imported"] = "onnxruntime" in sys.modules
import onnxruntime
told["onnxruntime is usable"] = callable(onnxruntime.InferenceSession)
from megatron.core.dist_checkpointing.exchange_utils import _shard_size
from megatron.core.dist_checkpointing.mapping import ShardedTensor
told["bytes"] = int(_shard_size(ShardedTensor.from_rank_offsets("w", torch.zeros(3, 5))))

from nemo.lightning import nemo_logger
from nemo.lightning.callback_group import CallbackGroup
from nemo.lightning.io.mixin import IOMixin

own = IOMixin._io_dump_yaml
present(True)
optional_packages.skip_yaml_copy()
told["yaml is nemo_run's"] = IOMixin._io_dump_yaml is own
present(False)
unavailable, nemo_logger.HAVE_RES = nemo_logger.lcp, True
optional_packages.define_local_checkpoint_callback()
told["local checkpoints are its own"] = nemo_logger.lcp is unavailable
nemo_logger.HAVE_RES = False
optional_packages.define_local_checkpoint_callback()
from nemo.lightning.one_logger_callback import OneLoggerNeMoCallback
told["telemetry by default"] = OneLoggerNeMoCallback._instance is not None
told["telemetry"] = len(CallbackGroup.get_instance()._callbacks)
told["yaml"] = IOMixin()._io_dump_yaml(None, attrs=["model"])
told["is local"] = isinstance(object(), nemo_logger.lcp.LocalCheckpointCallback)
told["llm"] = ["nemo.collections.llm" in sys.modules, find_spec("nemo.collections.llm").origin]
told["stand-ins"] = [name for name, module in sys.modules.items()
                     if (getattr(module, "__doc__", None) or "").startswith("Stand-in")]

from nemo.collections.llm.modelopt.distill.utils import get_tensor_shapes_adjust_fn_for_distillation
from nemo.collections.llm.modelopt.model_utils import save_modelopt_state
told["modelopt"] = [get_tensor_shapes_adjust_fn_for_distillation(None), save_modelopt_state(1, 2)]
from nemo.utils.exp_manager import ClearMLLogger, ExpManagerConfig
from omegaconf import OmegaConf
told["options of loggers"] = len(OmegaConf.structured(ExpManagerConfig)) > 10
try:
    ClearMLLogger({}, "", "", False)
except ImportError as error:
    told["clearml"] = str(error)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    packages = tmp_path_factory.mktemp("packages")
    for name in OPTIONAL:
        (packages / f"{name}.py").write_text("")
    # Under torchrun NeMo's telemetry would begin.
    job = {"CUDA_VISIBLE_DEVICES": "", "RANK": "0"}
    output = output_of(PROGRAM, packages, json.dumps(OPTIONAL), **job)
    answers: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answers


def skip_unless_absent(told: dict[str, Any], package: str) -> None:
    if package not in told["absent"]:
        pytest.skip(f"{package} is installed here")


def test_what_is_present_is_used(told: dict[str, Any]) -> None:
    assert told["where present"] == []
    assert told["yaml is nemo_run's"]
    assert told["local checkpoints are its own"]


@pytest.mark.parametrize("package", STAND_INS)
def test_what_is_absent_has_a_stand_in(told: dict[str, Any], package: str) -> None:
    skip_unless_absent(told, package)
    assert STAND_INS[package] in told["stand-ins"]


def test_the_parts_around_a_stand_in_stay(told: dict[str, Any]) -> None:
    """Only leaves are replaced: who has what `nemo.collections.llm` needs can import it."""
    imported, origin = told["llm"]
    assert not imported
    assert origin.endswith("nemo/collections/llm/__init__.py")
    assert "nemo.utils.loggers" not in told["stand-ins"]


@pytest.mark.parametrize(
    ("package", "part", "answer"), [("modelopt", "modelopt", [None] * 2), ("nemo_run", "yaml", {})]
)
def test_a_stand_in_does_nothing(
    told: dict[str, Any], package: str, part: str, answer: Any
) -> None:
    skip_unless_absent(told, package)
    assert told[part] == answer


def test_auto_resume_gets_its_imports_and_clearml_says_what_it_needs(told: dict[str, Any]) -> None:
    skip_unless_absent(told, "pandas")
    assert told["options of loggers"]
    assert "pandas" in told["clearml"]


def test_nothing_else_is_changed_for_a_gpu(told: dict[str, Any]) -> None:
    """Except that telemetry is off, and no callback is a local checkpoint."""
    assert told["telemetry by default"]
    assert told["telemetry"] == 0
    assert told["is local"] is False
    assert told["unified memory"] is False
    assert told["torch is untouched"]
    assert told["Megatron is untouched"]


def test_what_only_torchmetrics_imports_comes_when_it_is_used(told: dict[str, Any]) -> None:
    """Their import takes a fifth of a script's start."""
    assert told["not imported"] == ["matplotlib", "scipy.signal", "torchvision"]


def test_nemo_does_not_import_onnxruntime(told: dict[str, Any]) -> None:
    """Its import crashes on an emulated aarch64 machine; exports can still use it afterwards."""
    assert not told["onnxruntime is imported"]
    assert told["onnxruntime is usable"]


def test_megatron_measures_shards_without_numpy_s_product(told: dict[str, Any]) -> None:
    """It does so when several ranks save."""
    assert told["bytes"] == 3 * 5 * 4
