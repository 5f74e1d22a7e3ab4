"""What replaces loops and collectives of Megatron computes and saves the same, to the bit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

pytestmark = pytest.mark.usefixtures("megatron")

OP = distributed.ReduceOp


@pytest.fixture
def weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    found = [
        torch.nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((5, 3), (7,), (1,), (2, 2, 2))
    ]
    for weight in found:
        weight.grad = torch.randn(weight.shape, generator=generator)
    return found


def test_the_gradient_s_norm(weights: list[torch.nn.Parameter]) -> None:
    from megatron.core.optimizer import clip_grads as originals
    from megatron.core.optimizer import optimizer as patched

    grads = [weight.grad for weight in weights]
    assert patched.get_grad_norm_fp32 is not originals.get_grad_norm_fp32
    for tensors in (grads, []):
        assert patched.get_grad_norm_fp32(tensors) == originals.get_grad_norm_fp32(tensors)
    largest = max(grad.abs().max().item() for grad in grads if grad is not None)
    assert patched.get_grad_norm_fp32(grads, float("inf")) == largest


@pytest.mark.parametrize("norm", [0.5, 3.0])
def test_clipping(weights: list[torch.nn.Parameter], norm: float) -> None:
    from megatron.core.optimizer import clip_grads as originals
    from megatron.core.optimizer import optimizer as patched

    assert patched.clip_grad_by_total_norm_fp32 is not originals.clip_grad_by_total_norm_fp32
    grads: list[Any] = [weight.grad for weight in weights]
    found: list[list[Any]] = []
    for module in (originals, patched):
        copies = [torch.nn.Parameter(weight.detach()) for weight in weights]
        for copy, grad in zip(copies, grads, strict=True):
            copy.grad = grad.clone()
        module.clip_grad_by_total_norm_fp32(copies, 1.0, norm)
        found.append([copy.grad for copy in copies])
    assert all(map(torch.equal, *found))
    assert all(map(torch.equal, found[0], grads)) == (norm < 1)


def test_copies_of_weights_in_bfloat16(weights: list[torch.nn.Parameter]) -> None:
    from megakit.runtime.multi_tensor import copy_all

    sources = [weight.data for weight in weights]
    targets = [torch.zeros_like(source, dtype=torch.bfloat16) for source in sources]
    copy_all(sources, targets)
    assert all(map(torch.equal, targets, [source.bfloat16() for source in sources]))
    copy_all([], [])


@pytest.mark.parametrize("op", [OP.SUM, OP.MAX, OP.MIN, OP.PRODUCT])
def test_a_sum_over_one_rank(op: Any) -> None:
    """Groups of several ranks: tests/parallel."""
    ours, theirs = (torch.tensor([1.5, -0.0, float("nan"), float("inf")]) for _ in range(2))
    assert distributed.all_reduce(ours, op=op) is None
    distributed.all_reduce.__wrapped__(theirs, op=op)  # type: ignore[attr-defined]
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    work = distributed.all_reduce(ours, async_op=True)
    assert work is not None  # whoever waits gets something to wait for
    work.wait()


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


def test_a_checkpoint_is_written_without_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from megakit.runtime.saving import write_in_threads

    def fork() -> int:
        raise AssertionError("a process was started")

    def state() -> dict[str, Any]:
        values = {f"w{k}": torch.arange(1000.0) * k for k in range(5)}
        sharded = {key: ShardedTensor.from_rank_offsets(key, v) for key, v in values.items()}
        return {**sharded, "extra": ShardedObject("extra", {"a": 1}, (1,), (0,)), "common": [1]}

    write_in_threads()
    monkeypatch.setattr(os, "fork", fork)
    for step in range(2):
        folder = tmp_path / str(step)
        folder.mkdir()
        dist_checkpointing.save(state(), str(folder))
        loaded = dist_checkpointing.load(state(), str(folder))
        assert (loaded["common"], loaded["extra"]) == ([1], {"a": 1})
        assert all(torch.equal(loaded[f"w{k}"], torch.arange(1000.0) * k) for k in range(5))
        assert {"__0_0.distcp", "__0_1.distcp"} <= {path.name for path in folder.iterdir()}
