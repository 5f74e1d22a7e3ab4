"""Stand-ins for what is not installed, and nothing in the place of what is.

One process tells it all, since importing NeMo takes seconds: `use_accelerator("gpu")`, which needs
no GPU. That a training needs nothing that is absent, the chain shows.
"""

import json
from typing import Any

import pytest

from tests.scripts import output_of

PROGRAM = """
import json, sys
import numpy, torch
vars(numpy).pop("product", None)  # as in numpy 2
from megakit.runtime import use_accelerator

names = ("current_device", "manual_seed", "Stream", "memory_allocated")
functions = lambda: [*(getattr(torch.cuda, name) for name in names), torch.Tensor.to, torch.zeros]
before = functions()
use_accelerator("gpu")
told = {"not imported": [name for name in ("matplotlib", "scipy.signal", "torchvision")
                         if name not in sys.modules]}
from megatron.core.inference.unified_memory import has_unified_memory
from megatron.core.jit import jit_fuser
told["torch is untouched"] = before == functions()
told["Megatron is untouched"] = jit_fuser is torch.compile
told["unified memory"] = has_unified_memory
from megatron.core.dist_checkpointing.exchange_utils import _shard_size
from megatron.core.dist_checkpointing.mapping import ShardedTensor
told["bytes"] = int(_shard_size(ShardedTensor.from_rank_offsets("w", torch.zeros(3, 5))))

from nemo.collections.llm.modelopt import model_utils
from nemo.lightning import nemo_logger
from nemo.lightning.callback_group import CallbackGroup
told["modelopt"] = hasattr(model_utils, "__file__")
told["telemetry"] = len(CallbackGroup.get_instance()._callbacks)
told["is local"] = isinstance(object(), nemo_logger.lcp.LocalCheckpointCallback)
print(json.dumps(told))
"""

PRESENT = """
import sys
sys.path.insert(0, sys.argv[1])
from megakit.runtime import optional_packages

optional_packages.replace_modules()
print([name for name in sys.modules if name.startswith("nemo.")])
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    # Under torchrun NeMo's telemetry would begin.
    output = output_of(PROGRAM, CUDA_VISIBLE_DEVICES="", RANK="0")
    answers: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answers


def test_what_is_present_is_used(tmp_path: Any) -> None:
    for name in ("modelopt", "pandas"):
        (tmp_path / f"{name}.py").write_text("")
    assert output_of(PRESENT, tmp_path) == "[]\n"


def test_what_is_absent_is_not_needed(told: dict[str, Any]) -> None:
    """And telemetry is off, no callback is a local checkpoint, and numpy 2 measures shards."""
    assert told["telemetry"] == 0
    assert told["is local"] is False
    assert told["unified memory"] is False
    assert told["modelopt"] is False
    assert told["bytes"] == 3 * 5 * 4


def test_nothing_else_is_changed_for_a_gpu(told: dict[str, Any]) -> None:
    assert told["torch is untouched"]
    assert told["Megatron is untouched"]


def test_what_only_torchmetrics_imports_comes_when_it_is_used(told: dict[str, Any]) -> None:
    """Their import takes a fifth of a script's start."""
    assert told["not imported"] == ["matplotlib", "scipy.signal", "torchvision"]
