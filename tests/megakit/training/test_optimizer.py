"""Megatron's optimizer as the scripts use it; in trainings: tests/parallel and tests/faults."""

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


class Training:
    """An Adam made by torch, fused afterwards, on gradients that depend on the step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights = weights()
        self.adam = torch.optim.AdamW(self.weights, lr=1e-2, weight_decay=0.01)
        made_of(monkeypatch, self.adam)

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for weight in self.weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            self.adam.param_groups[0]["lr"] = 1e-2 / (1 + step)
            self.adam.step()


def test_its_state_goes_on_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Training(monkeypatch)
    whole.run(0, 20)
    begun, resumed = Training(monkeypatch), Training(monkeypatch)
    begun.run(0, 11)
    for old, new in zip(begun.weights, resumed.weights, strict=True):
        new.data.copy_(old.data)
    resumed.adam.load_state_dict(begun.adam.state_dict())
    resumed.run(11, 20)
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
