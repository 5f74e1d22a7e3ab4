"""Stand-ins for what is not installed, and nothing in the place of what is.

One process tells it all, since importing NeMo takes seconds: `use_accelerator("gpu")`, which needs
no GPU, with packages beside it that come and go. That a training needs nothing that is absent, the
chain shows.
"""

import json
from typing import Any

import pytest

from tests.scripts import output_of

PROGRAM = """
import importlib, json, sys
from megakit.runtime import optional_packages, cpu, use_accelerator

def present(yes):
    (sys.path.insert if yes else lambda _, path: sys.path.remove(path))(0, sys.argv[1])
    importlib.invalidate_caches()

told = {}
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
told["telemetry"] = len(CallbackGroup.get_instance()._callbacks)
told["is local"] = isinstance(object(), nemo_logger.lcp.LocalCheckpointCallback)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    packages = tmp_path_factory.mktemp("packages")
    for name in ("modelopt", "nemo_run", "pandas"):
        (packages / f"{name}.py").write_text("")
    # Under torchrun NeMo's telemetry would begin.
    output = output_of(PROGRAM, packages, CUDA_VISIBLE_DEVICES="", RANK="0")
    answers: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answers


def test_what_is_present_is_used(told: dict[str, Any]) -> None:
    assert told["where present"] == []
    assert told["yaml is nemo_run's"]


def test_nothing_else_is_changed_for_a_gpu(told: dict[str, Any]) -> None:
    """Except that telemetry is off, and no callback is a local checkpoint."""
    assert told["telemetry"] == 0
    assert told["is local"] is False
    assert told["unified memory"] is False
    assert told["torch is untouched"]
    assert told["Megatron is untouched"]


def test_what_only_torchmetrics_imports_comes_when_it_is_used(told: dict[str, Any]) -> None:
    """Their import takes a fifth of a script's start."""
    assert told["not imported"] == ["matplotlib", "scipy.signal", "torchvision"]


def test_megatron_measures_shards_without_numpy_s_product(told: dict[str, Any]) -> None:
    """It does so when several ranks save."""
    assert told["bytes"] == 3 * 5 * 4
