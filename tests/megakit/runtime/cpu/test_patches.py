"""CPU patches, all in place: what a training of the tutorial's model would not tell of them."""

import logging
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.usefixtures("megatron")


def test_optimizers_do_not_look_for_a_gpu_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def look() -> int:
        raise AssertionError("NVIDIA's library was asked")

    monkeypatch.setattr(torch.cuda, "device_count", look)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", look, raising=False)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()


def test_a_tensor_to_cuda() -> None:
    import torch

    tensor = torch.ones(2)
    moved = [tensor.to("cuda", torch.float64), tensor.to(device=0)]
    assert tensor.cuda() is tensor
    assert [one.device.type for one in moved] == ["cpu", "cpu"]
    assert moved[0].dtype == torch.float64


def test_tensors_made_on_cuda() -> None:
    import torch

    made = (
        torch.tensor([1], device="cuda"),
        torch.zeros(2, device=torch.device("cuda", 0)),
        torch.empty_like(torch.ones(2), device=0),
        torch.empty(2, pin_memory=True).pin_memory(),
    )
    assert [tensor.device.type for tensor in made] == ["cpu"] * 4


def test_a_process_group_with_nccl() -> None:
    import torch.distributed as dist

    group = dist.new_group([0], backend="nccl")
    assert dist.get_backend(group) == "gloo"
    dist.destroy_process_group(group)


def test_nothing_is_compiled() -> None:
    """It would need a C++ compiler and half a minute."""
    import torch
    from megatron.core.jit import jit_fuser

    assert jit_fuser is not torch.compile


@pytest.fixture
def tracker() -> Iterator[None]:
    """Megatron's tracker, put back afterwards with the state of torch's generator."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    state, states = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    yield
    get_cuda_rng_tracker().set_states(states)
    torch.set_rng_state(state)


def test_dropout_under_megatrons_tracker(tracker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.tensor_parallel import random as megatron_random

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger(megatron_random.__name__), "handlers", [handler])
    state = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
    with get_cuda_rng_tracker().fork():
        second = torch.rand(3)
    assert not torch.equal(first, second)
    assert warnings == []


def test_dropout_after_nemo_has_seeded(tracker: None) -> None:
    """Another seed draws other numbers, and so does another pipeline stage."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from nemo.lightning import megatron_init

    drawn = []
    for seed, stage in ((7, 0), (7, 0), (8, 0), (7, 1)):
        get_cuda_rng_tracker().reset()
        parallel_state.set_pipeline_model_parallel_rank(stage)
        try:
            megatron_init._set_random_seed(seed)
        finally:
            parallel_state.set_pipeline_model_parallel_rank(None)
        with get_cuda_rng_tracker().fork():
            drawn.append(torch.rand(3))
    assert [torch.equal(drawn[0], other) for other in drawn[1:]] == [True, False, False]
