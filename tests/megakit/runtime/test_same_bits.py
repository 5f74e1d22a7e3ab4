"""Collectives of one rank and the writing of checkpoints: the same as by the frameworks."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

pytestmark = pytest.mark.usefixtures("megatron")

OP = distributed.ReduceOp


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


def test_a_tensor_to_cuda() -> None:
    tensor = torch.ones(2)
    moved = [tensor.to("cuda", torch.float64), tensor.to(device=0), tensor.cuda()]
    moved += [torch.zeros(2, device="cuda"), torch.empty(2, pin_memory=True).pin_memory()]
    assert [one.device.type for one in moved] == ["cpu"] * 5
    assert moved[0].dtype == torch.float64
