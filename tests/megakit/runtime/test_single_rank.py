"""Collectives of a single rank: what they leave, and what they leave to the backend.

Whole trainings with and without them, and groups of several ranks: tests/parallel.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

pytestmark = pytest.mark.usefixtures("megatron")

COPY, REDUCE = "copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"


def places() -> dict[str, tuple[Any, str]]:
    """Where each of the functions stands that are replaced, and which patch replaces it."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import layers

    return {
        "all_reduce": (distributed, "skip_all_reduce"),
        "_coalescing_manager": (param_and_grad_buffer, "skip_coalescing"),
        COPY: (layers, "skip_tensor_parallel_regions"),
        REDUCE: (layers, "skip_tensor_parallel_regions"),
    }


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The replaced functions over originals that count their calls and do nothing else."""
    from megakit.runtime import single_rank

    stack = SimpleNamespace(calls=[])

    def original(name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            stack.calls.append((name, args, kwargs))
            return contextlib.nullcontext(name) if name.startswith("_") else name

        return function

    owners = {name: owner for name, (owner, _) in places().items()}
    for name, owner in owners.items():
        monkeypatch.setattr(owner, name, original(name))
    for patch in single_rank.PATCHES:
        patch()
    for name, owner in owners.items():
        setattr(stack, name.removeprefix("_"), getattr(owner, name))
    return stack


@pytest.fixture(params=["default", "data", "tensor"])
def group(request: pytest.FixtureRequest) -> Any:
    """A group of one rank."""
    from megatron.core import parallel_state

    return {
        "default": lambda: None,
        "data": parallel_state.get_data_parallel_group,
        "tensor": parallel_state.get_tensor_model_parallel_group,
    }[request.param]()


class Several(distributed.ProcessGroup):
    """A group of two ranks that is never used."""

    def size(self) -> int:
        return 2


@pytest.fixture(params=["two ranks", "a kind of Megatron's own", "a rank outside"])
def other_group(request: pytest.FixtureRequest) -> Any:
    return {
        "two ranks": lambda: Several(0, 2),  # type: ignore[call-arg]
        "a kind of Megatron's own": lambda: SimpleNamespace(size=lambda: 1),
        "a rank outside": lambda: distributed.GroupMember.NON_GROUP_MEMBER,
    }[request.param]()


OP = distributed.ReduceOp


@pytest.mark.parametrize("op", [OP.SUM, OP.AVG, OP.MAX, OP.MIN, OP.PRODUCT])
def test_one_rank_has_its_sum(stack: SimpleNamespace, group: Any, op: Any) -> None:
    value = torch.tensor([1.5, -2.0, float("nan")])
    before = value.clone()
    assert stack.all_reduce(value, op=op, group=group) is None
    assert stack.all_reduce(value, op, group) is None
    assert torch.equal(value.nan_to_num(7), before.nan_to_num(7))
    assert stack.calls == []


def test_one_rank_has_what_the_backend_would_give() -> None:
    """Gloo's result in a group of one, by torch's function itself."""
    value = torch.randn(100)
    for op in (OP.SUM, OP.MAX, OP.MIN, OP.PRODUCT):
        reduced = value.clone()
        distributed.distributed_c10d.all_reduce(reduced, op)
        assert torch.equal(reduced, value)


def test_sums_are_left_to_the_backend_for_others(stack: SimpleNamespace, other_group: Any) -> None:
    value = torch.ones(2)
    assert stack.all_reduce(value, group=other_group) == "all_reduce"
    assert stack.calls == [("all_reduce", (value, OP.SUM, other_group, False), {})]


def test_whoever_waits_gets_something_to_wait_for(stack: SimpleNamespace, group: Any) -> None:
    value = torch.ones(2)
    assert stack.all_reduce(value, group=group, async_op=True) == "all_reduce"
    with stack.coalescing_manager(group, async_ops=True) as work:
        assert work == "_coalescing_manager"
    assert stack.calls == [
        ("all_reduce", (value, OP.SUM, group, True), {}),
        ("_coalescing_manager", (group,), {"async_ops": True}),
    ]


def test_a_sum_that_changes_its_terms_is_left_to_the_backend(stack: SimpleNamespace) -> None:
    """NCCL's has a factor: even one rank's term is multiplied."""
    factor = distributed._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
    assert stack.all_reduce(torch.ones(2), op=factor) == "all_reduce"


def test_nothing_is_left_out_before_there_are_groups(
    stack: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that comes is torch's own."""
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    assert stack.all_reduce(torch.ones(2)) == "all_reduce"


def test_nothing_is_gathered_up(stack: SimpleNamespace, group: Any) -> None:
    with stack.coalescing_manager(group, async_ops=False):
        stack.all_reduce(torch.ones(2), group=group)
    with stack.coalescing_manager(group):
        pass
    assert stack.calls == []


def test_others_are_gathered_up(stack: SimpleNamespace, other_group: Any) -> None:
    device = torch.device("cpu")
    for arguments in ((other_group,), (other_group, device)):
        with stack.coalescing_manager(*arguments, async_ops=False) as work:
            assert work == "_coalescing_manager"
    assert len(stack.calls) == 2


@pytest.mark.parametrize("name", [COPY, REDUCE])
def test_layers_of_one_rank(stack: SimpleNamespace, group: Any, name: str) -> None:
    value = torch.ones(2, requires_grad=True)
    assert getattr(stack, name)(value, group=group) is value
    assert getattr(stack, name)(value, group) is value
    assert stack.calls == []


@pytest.mark.parametrize("name", [COPY, REDUCE])
def test_layers_of_others(stack: SimpleNamespace, other_group: Any, name: str) -> None:
    value = torch.ones(2)
    assert getattr(stack, name)(value, group=other_group) == name
    assert stack.calls == [(name, (value,), {"group": other_group})]


def test_only_one_rank_of_all_means_one_of_every_kind(
    stack: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a group, a layer's is that of tensor parallelism, and a sum's that of all ranks."""
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    value = torch.ones(2)
    getattr(stack, COPY)(value)
    stack.all_reduce(value)
    assert [name for name, *_ in stack.calls] == [COPY, "all_reduce"]


@pytest.fixture(params=["all_reduce", "_coalescing_manager", COPY, REDUCE])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a function that this stack lacks."""
    name: str = request.param
    for other, (owner, _) in places().items():
        monkeypatch.setattr(owner, other, getattr(owner, other))  # to be put back
    monkeypatch.delattr(places()[name][0], name)
    return name


def test_a_stack_that_lacks_one_of_them(missing: str) -> None:
    from megakit.runtime import single_rank

    owner, patch = places()[missing]
    message = rf"{owner.__name__}\.{missing} is gone .* requirements\.lock"
    with pytest.raises(RuntimeError, match=message):
        getattr(single_rank, patch)()
