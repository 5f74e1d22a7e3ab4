"""Stand-ins for what the stack lacks, and how parts of the frameworks are replaced."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed

from megakit.runtime import patching
from megakit.runtime.patching import Patch, patch, require_attribute
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


def test_what_is_absent_is_not_needed_and_nothing_else_is_changed_for_a_gpu(tmp_path: Path) -> None:
    """On a machine with a CUDA compiler and no GPU, where Megatron alone fails."""
    compiler = tmp_path / "cuda" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    output = output_of(
        PROGRAM,
        CUDA_HOME=str(tmp_path / "cuda"),
        CUDA_VISIBLE_DEVICES="",
        RANK="0",  # as under torchrun, where NeMo's telemetry would begin
        TORCH_CUDA_ARCH_LIST=None,
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
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


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with two attributes; the list of patches is empty."""
    monkeypatch.setattr(patching, "PATCHES", [])
    monkeypatch.delenv("MEGAKIT_STOCK", raising=False)
    module = ModuleType("stack")
    vars(module).update(there="theirs", Class=type("Class", (), {"method": "theirs"}))
    return module


def test_a_name_that_is_there_and_one_that_the_stack_lacks(stack: ModuleType) -> None:
    patch(stack, "there", None, group="needed", reason="why")
    patch(stack.Class, "method", "ours", group="safe", reason="", worth="3%", when="now")
    assert require_attribute(stack, "there") is None
    assert stack.Class.method == "ours"
    assert require_attribute("json", "loads") is json.loads
    message = r"stack\.gone is gone from this version of the stack\. .* requirements\.lock"
    with pytest.raises(RuntimeError, match=message):
        patch(stack, "gone", None, group="needed", reason="")
    with pytest.raises(RuntimeError, match=r"json\.absent is gone"):
        require_attribute("json", "absent")
    assert not hasattr(stack, "gone")
    assert [
        Patch("stack", "there", "needed", "why", worth="", when="always"),
        Patch(f"{__name__}.Class", "method", "safe", "", worth="3%", when="now"),
    ] == patching.PATCHES


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", ["SUM", "MAX", "MIN", "PRODUCT"])
def test_a_sum_over_one_rank(name: str) -> None:
    """Groups of several ranks: tests/parallel."""
    op: Any = getattr(distributed.ReduceOp, name)
    ours, theirs = (torch.tensor([1.5, -0.0, float("nan"), float("inf")]) for _ in range(2))
    assert distributed.all_reduce(ours, op=op) is None
    distributed.all_reduce.__wrapped__(theirs, op=op)  # type: ignore[attr-defined]
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    work = distributed.all_reduce(ours, async_op=True)
    assert work is not None  # whoever waits gets something to wait for
    work.wait()


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("kind", ["copy_to", "reduce_from"])
def test_a_layer_s_sum_and_its_gradient(kind: str) -> None:
    from megatron.core.tensor_parallel import layers

    region = getattr(layers, f"{kind}_tensor_model_parallel_region")
    results = []
    for function in (region, region.__wrapped__):
        x = torch.tensor([0.1, 0.7], requires_grad=True)
        y = function(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    assert all(map(torch.equal, *results))
