"""Megatron's optimizer as the scripts use it; in trainings: tests/parallel and tests/faults."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


def weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((64, 50), (50,), (3, 64), (1,))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def made_of(monkeypatch: pytest.MonkeyPatch, *parts: Any) -> Any:
    """What comes of an optimizer that Megatron has chained of these."""
    from nemo.lightning.pytorch.optim import MegatronOptimizerModule

    from megakit.training import megatron_adam

    chained = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=part) for part in parts]
    )
    theirs = [SimpleNamespace(mcore_optimizer=chained)]
    monkeypatch.setattr(MegatronOptimizerModule, "optimizers", lambda self, model: theirs)
    assert megatron_adam(0.01).optimizers(None) is theirs


def test_every_group_of_torchs_adam_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = weights()
    adams = [torch.optim.AdamW([{"params": [first]}, {"params": others}]) for _ in range(2)]
    made_of(monkeypatch, *adams)
    for adam in adams:
        assert [group["fused"] for group in adam.param_groups] == [True, True]


def test_other_optimizers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's Adam is fused by itself; a rank without weights has no optimizer."""

    class FusedAdam(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(weights(), {"lr": 0.1})

    parts: list[Any] = [FusedAdam(), torch.optim.SGD(weights(), 0.1, momentum=0.9), None]
    before = [sorted(part.param_groups[0]) for part in parts if part is not None]
    made_of(monkeypatch, *parts)
    assert [sorted(part.param_groups[0]) for part in parts if part is not None] == before
    assert not parts[1].param_groups[0]["fused"]


def test_the_learning_rate_is_not_logged_at_every_step() -> None:
    from nemo.lightning.pytorch.optim import MegatronOptimizerModule

    from megakit.training import megatron_adam

    module = megatron_adam(0.01)
    assert isinstance(module, MegatronOptimizerModule)
    module.on_train_batch_start(SimpleNamespace(), None, None, 0)  # no `log` is looked for


class Training:
    """An Adam made by torch, fused afterwards or not, on gradients that depend on the step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
        self.weights = weights()
        self.adam = torch.optim.AdamW(self.weights, lr=1e-2, weight_decay=0.01)
        if fused:
            made_of(monkeypatch, self.adam)

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for weight in self.weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            self.adam.param_groups[0]["lr"] = 1e-2 / (1 + step)
            self.adam.step()


def test_fused_it_gives_the_same_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of size 1 differ by 1e-6 at most after 100 steps: by units in the last place."""
    fused, plain = Training(monkeypatch, True), Training(monkeypatch, False)
    before = [weight.detach().clone() for weight in plain.weights]
    for training in (fused, plain):
        training.run(0, 100)
    for own, theirs, old in zip(fused.weights, plain.weights, before, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-6)
        assert (own - old).abs().mean() > 1e-3


@pytest.mark.parametrize("was_fused", [True, False])
def test_its_state_goes_on_exactly(monkeypatch: pytest.MonkeyPatch, was_fused: bool) -> None:
    """In the way in which it began: a state says whether it was fused."""
    whole = Training(monkeypatch, was_fused)
    whole.run(0, 20)
    begun, resumed = Training(monkeypatch, was_fused), Training(monkeypatch, True)
    begun.run(0, 11)
    for old, new in zip(begun.weights, resumed.weights, strict=True):
        new.data.copy_(old.data)
    resumed.adam.load_state_dict(begun.adam.state_dict())
    resumed.run(11, 20)
    assert resumed.adam.param_groups[0]["fused"] == (True if was_fused else None)
    assert all(map(torch.equal, resumed.weights, whole.weights))


def test_its_step_is_that_of_torchs_fused_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit: with groups of their own settings, and weights that join later."""
    ours, theirs = weights(), weights()
    groups: list[list[dict[str, Any]]] = [
        [
            {"params": some[:2], "weight_decay": 0.1, "lr": 1e-2},
            {"params": some[2:]},
            {"params": [torch.nn.Parameter(torch.ones(1))]},  # never has a gradient
        ]
        for some in (ours, theirs)
    ]
    adam = torch.optim.AdamW(groups[0], betas=(0.9, 0.98))
    made_of(monkeypatch, adam)
    plain = torch.optim.AdamW(groups[1], betas=(0.9, 0.98), fused=True)
    assert type(adam) is not type(plain)
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(pair[0].shape, generator=generator)
            for weight in pair:
                # One is frozen at first, and another again and again.
                is_frozen = (number == 2 and step < 5) or (number == 1 and step % 3 == 2)
                weight.grad = None if is_frozen else gradient.clone()
        for optimizer in (adam, plain):
            optimizer.param_groups[1]["lr"] = 1e-3 * (1 + step)
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
    assert [adam.state[weight]["step"].item() for weight in ours] == [12, 8, 7, 12]
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(adam.state[own], plain.state[other], rtol=0, atol=0)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_what_its_short_step_does_not_know_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    found = []
    for is_ours in (True, False):
        weight = torch.nn.Parameter(torch.arange(4.0))
        adam = torch.optim.AdamW([weight], lr=0.1, fused=not is_ours)
        adam.param_groups[0][option] = True
        if is_ours:
            made_of(monkeypatch, adam)
        for step in range(4):
            weight.grad = torch.full((4,), 1.0 + step)
            adam.step()
        found.append(weight.detach())
    assert torch.equal(*found)


def test_a_loaded_state_does_not_bring_back_torchs_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps the step of a class anew whenever it loads a state."""
    training = Training(monkeypatch, True)
    training.run(0, 3)
    step = type(training.adam).step
    training.adam.load_state_dict(training.adam.state_dict())
    assert type(training.adam).step is step


def test_a_private_function_that_torch_has_removed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megakit.training import optimizer

    with monkeypatch.context() as patch:
        patch.delattr(torch, "_fused_adamw_")
        with pytest.raises(RuntimeError, match=r"torch\._fused_adamw_ is gone from this version"):
            importlib.reload(optimizer)
    importlib.reload(optimizer)
