"""Collectives of a single rank: the result of the backend's, without the backend.

Whole trainings with and without them, and groups of several ranks: tests/parallel.
"""

from typing import Any

import pytest
import torch
from torch import distributed

pytestmark = pytest.mark.usefixtures("megatron")

OP = distributed.ReduceOp


@pytest.mark.parametrize("op", [OP.SUM, OP.MAX, OP.MIN, OP.PRODUCT])
def test_the_same_bits_as_the_backend_s(op: Any) -> None:
    ours, theirs = (torch.tensor([1.5, -0.0, float("nan"), float("inf")]) for _ in range(2))
    assert distributed.all_reduce(ours, op=op) is None
    distributed.all_reduce.__wrapped__(theirs, op=op)  # type: ignore[attr-defined]
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


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


class _Several(distributed.ProcessGroup):
    """A group of two ranks that fails when it is used."""

    def size(self) -> int:
        return 2


def test_several_ranks_are_left_to_the_backend() -> None:
    with pytest.raises(Exception, match="backend"):
        distributed.all_reduce(torch.ones(2), group=_Several(0, 2))  # type: ignore[call-arg]


def test_whoever_waits_gets_something_to_wait_for() -> None:
    work = distributed.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    work.wait()
