"""What a script's training really uses at its defaults: learning rates, Adam, clipping; its log.

Real trainings. The functions below run in the pool's processes.
"""

import importlib
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle  # type: ignore[import-untyped]
import pytest

from tests.parallel import jobs
from tests.scripts import read_csv

STEPS = 20


@dataclass(frozen=True)
class Used:
    """What the optimizer was given, step by step.

    Attributes:
        groups: The settings of all groups of weights; where they differ, all values.
        norms: Norm of the gradients.
        losses: What the training step returned.
    """

    groups: list[dict[str, set[Any]]]
    norms: list[float]
    losses: list[float]


def train(stage: str, folder: Path, factor: float) -> Used:
    """Trains with the loss multiplied by a factor."""
    import lightning.pytorch as pl
    import torch

    from megakit.training import MeanLossReduction, train
    from megakit.training.optimizer import FusedAdam

    script: Any = importlib.import_module(f"model_{stage}")
    options = getattr(script, f"{stage.title()}Options")(
        output_dir=folder, dataset="digits", precision="32", max_steps=STEPS
    )
    run = jobs.make_run(getattr(script, stage.upper()), options, jobs.layout())
    module, data, trainer = jobs.built_by(getattr(script, stage), run)
    groups, norms, losses = [], [], []
    step, report = FusedAdam.step, MeanLossReduction.report

    def watched(self: Any, closure: Any = None) -> Any:
        names = ("lr", "betas", "eps", "weight_decay")
        groups.append({name: {group[name] for group in self.param_groups} for name in names})
        gradients = [w.grad for group in self.param_groups for w in group["params"]]
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
        return step(self, closure)

    watched.hooked = True  # type: ignore[attr-defined]  # torch shall not wrap it

    def multiplied(*arguments: Any) -> Any:
        loss, reported = report(*arguments)
        return factor * loss, reported

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            losses.append(float(outputs["loss"]))

        def __deepcopy__(self, memo: object) -> "Watch":
            return self

    with (
        mock.patch.object(FusedAdam, "step", watched),
        mock.patch.object(MeanLossReduction, "report", multiplied),
    ):
        trainer.callbacks.insert(0, Watch())
        train(model=module, data=data, trainer=trainer)
    return Used(groups, norms, losses)


class Training:
    def __init__(self, ranks: Any, folder: Path, stage: str, factor: float) -> None:
        cloudpickle.register_pickle_by_value(jobs)  # ranks cannot import it, nor this module
        (self.used,) = ranks.run(train, stage, folder, factor, world_size=1)
        self.rows = read_csv(folder / stage / "metrics.csv")

    def column(self, name: str) -> dict[int, float]:
        return {int(row["step"]): float(row[name]) for row in self.rows}


@pytest.fixture(scope="module")
def training(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def train(stage: str, factor: float = 1.0) -> Training:
        return Training(ranks, tmp_path_factory.mktemp("settings"), stage, factor)

    return train


def logged(values: list[float]) -> dict[int, Any]:
    """The values of the steps that have a row."""
    return {step: pytest.approx(values[step - 1], rel=1e-5) for step in (1, 10, 20)}


@pytest.mark.parametrize(
    ("stage", "peak", "warm_up"), [("pretrain", 2e-3, 2), ("finetune", 6e-2, 6)]
)
def test_learning_rates(training: Any, stage: str, peak: float, warm_up: int) -> None:
    """They rise over so many of 20 steps, and fall by half a cosine; the log has each step's."""
    run = training(stage)
    rates = [rate for group in run.used.groups for rate in group["lr"]]
    rising = [peak * n / (warm_up + 1) for n in range(1, warm_up + 1)]
    fall = 20 - warm_up
    falling = [peak * (1 + math.cos(math.pi * n / fall)) / 2 for n in range(fall)]
    assert rates == pytest.approx([*rising, *falling])
    assert run.column("lr") == logged(rates)


@pytest.mark.parametrize(("stage", "beta1"), [("pretrain", 0.9), ("finetune", 0.7)])
def test_adam(training: Any, stage: str, beta1: float) -> None:
    for group in training(stage).used.groups:
        assert group["betas"] == {(beta1, 0.98)}
        assert group["eps"] == {1e-8}
        assert group["weight_decay"] == {0.01, 0.0}  # 0 of biases


@pytest.mark.parametrize("factor", [1.0, 1000.0])
def test_gradients_are_clipped_and_the_log_has_their_norm_before(
    training: Any, factor: float
) -> None:
    run = training("pretrain", factor)
    norms = run.column("grad_norm")
    assert (min(norms.values()) > 2) == (max(norms.values()) > 1) == (factor > 1)
    clipped = {step: min(norm, 1.0) for step, norm in norms.items()}
    assert clipped == logged(run.used.norms)


def test_a_row_has_the_loss_of_its_own_step(training: Any) -> None:
    run = training("pretrain")
    assert run.column("train_loss") == logged(run.used.losses)
