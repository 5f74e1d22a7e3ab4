"""Stand-ins for what the stack lacks, and how parts of the frameworks are replaced."""

import json
from functools import partial

import pytest

from megakit.runtime.patching import patch, require_attribute
from tests.scripts import output_of

#: `use_accelerator("gpu")` needs no GPU. One process tells it all: importing NeMo takes seconds.

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
told["Megatron is untouched"] = jit_fuser.__module__ == "torch"
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


@pytest.mark.long
def test_what_is_absent_is_not_needed_and_nothing_else_is_changed_for_a_gpu() -> None:
    output = output_of(
        PROGRAM,
        CUDA_VISIBLE_DEVICES="",
        RANK="0",  # as under torchrun, where NeMo's telemetry would begin
    )
    assert json.loads(output.splitlines()[-1]) == {
        "not imported": ["matplotlib", "scipy.signal", "torchvision"],
        "torch is untouched": True,
        "Megatron is untouched": True,
        "unified memory": False,
        "bytes": 3 * 5 * 4,  # although numpy 2 has no `product`
        "modelopt": False,
        "telemetry": 0,
        "is local": False,
    }


MEGATRON_ALONE = """
import json, sys, types
from megakit.runtime import use_megatron

use_megatron("cpu")
import megatron.core.optimizer, torch
from megakit.runtime.patching import PATCHES

made = [getattr(torch.cuda, one.name) for one in PATCHES if one.owner == "torch.cuda"]
functions = [one for one in made if isinstance(one, types.FunctionType)]
print(json.dumps({
    "NeMo's": sorted({"nemo", "lightning", "torchmetrics"} & sys.modules.keys()),
    "under two names": len(functions) - len({*functions}),
    "functions": len(functions) > 9,
    "safe": [one.name for one in PATCHES if one.group == "safe"],
}))
"""


@pytest.mark.long
def test_megatron_alone_needs_no_nemo_and_torch_dynamo_takes_the_functions() -> None:
    """torch._dynamo, which megatron-core 0.19 imports, refuses a function under two names."""
    output = output_of(MEGATRON_ALONE)
    safe = ["allgather_into_tensor_coalesced", "_reduce"]
    expected = {"NeMo's": [], "under two names": 0, "functions": True, "safe": safe}
    assert json.loads(output.splitlines()[-1]) == expected


def test_a_name_that_the_stack_lacks() -> None:
    assert require_attribute("json", "loads") is json.loads
    message = r"json\.gone is gone from this version of the stack\. .* requirements\.lock"
    for ask in (require_attribute, partial(patch, replacement=None, group="needed", reason="")):
        with pytest.raises(RuntimeError, match=message):
            ask(json, "gone")
