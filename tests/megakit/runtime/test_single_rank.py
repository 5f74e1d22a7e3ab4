"""Collectives of a single rank: what they leave, and what they leave to the backend.

Whole trainings with and without them, and groups of several ranks: tests/parallel.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

pytestmark = pytest.mark.usefixtures("megatron")

OP = distributed.ReduceOp


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The replaced functions over originals that do nothing but return their name."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import layers

    from megakit.runtime import single_rank

    owners: dict[str, Any] = {
        "all_reduce": distributed,
        "_coalescing_manager": param_and_grad_buffer,
        "copy_to_tensor_model_parallel_region": layers,
        "reduce_from_tensor_model_parallel_region": layers,
    }
    for name, owner in owners.items():
        monkeypatch.setattr(owner, name, lambda *args, name=name, **kwargs: name)
    for patch in single_rank.PATCHES:
        patch()
    return SimpleNamespace(**{name: getattr(owner, name) for name, owner in owners.items()})


class Several(distributed.ProcessGroup):
    """A group of two ranks that is never used."""

    def size(self) -> int:
        return 2


def test_one_rank_has_its_sum(stack: SimpleNamespace) -> None:
    value = torch.tensor([1.5, -2.0, float("nan")])
    before = value.clone()
    for op in (OP.SUM, OP.AVG, OP.MAX, OP.MIN, OP.PRODUCT):
        assert stack.all_reduce(value, op=op) is None
    assert torch.equal(value.nan_to_num(7), before.nan_to_num(7))


TWO_RANKS = Several(0, 2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "group", [TWO_RANKS, distributed.GroupMember.NON_GROUP_MEMBER], ids=["two ranks", "outside"]
)
def test_others_are_left_to_the_backend(stack: SimpleNamespace, group: Any) -> None:
    value = torch.ones(2)
    for name, function in vars(stack).items():
        given = group if name == "_coalescing_manager" else value
        options = {} if name == "_coalescing_manager" else {"group": group}
        assert function(given, **options) == name


def test_whoever_waits_gets_something_to_wait_for(stack: SimpleNamespace) -> None:
    assert stack.all_reduce(torch.ones(2), async_op=True) == "all_reduce"
    assert stack._coalescing_manager(None, async_ops=True) == "_coalescing_manager"


def test_a_sum_that_changes_its_terms_is_left_to_the_backend(stack: SimpleNamespace) -> None:
    """NCCL's has a factor: even one rank's term is multiplied."""
    factor = distributed._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
    assert stack.all_reduce(torch.ones(2), op=factor) == "all_reduce"


def test_only_one_rank_of_all_means_one_of_every_kind(
    stack: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a group, a layer's is that of tensor parallelism, and a sum's that of all ranks."""
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    value = torch.ones(2)
    name = "copy_to_tensor_model_parallel_region"
    assert getattr(stack, name)(value) == name
    assert stack.all_reduce(value) == "all_reduce"
