"""Losses, masks and metrics that would give wrong numbers: refused, named, or made right.

`train` and `validate` run in the pool's processes.
"""

import re
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megakit.errors import UserError
from megakit.testing import Ranks
from tests.parallel import jobs
from tests.scripts import read_json


class Masked:
    """A dataset with a mask of its own, 0 for every second sample."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        sample = self.dataset[index]
        return {**sample, "loss_mask": float(sample["idx"] % 2)}


def with_report(self: Any, batch: Any, output: Any, **how: Any) -> Any:
    """A loss with class weights, ignored classes, or none of them."""
    import torch
    from torch.nn import functional

    if "weight" in how:
        how["weight"] = torch.tensor(how["weight"])
    return self.report(partial(functional.cross_entropy, **how), output, batch["label"], batch)


def without_report(self: Any, batch: Any, output: Any) -> Any:
    """A loss as in ladder/4_nemo.py."""
    from torch.nn import functional

    loss = functional.cross_entropy(output.float(), batch["label"])
    return loss, {"avg": loss.detach().clone()}


def built(folder: Path, world_size: int = 1, **options: Any) -> Any:
    """A run of `model_finetune.py`, its Lightning module, data module and trainer."""
    import model_finetune as script

    given = jobs.options_of("finetune", folder, checkpoint="none", **options)
    run = jobs.make_run(script.FINETUNE, given, jobs.layout(world_size, micro_batches=1))
    return run, *jobs.built_by(script.finetune, run)


def metric(name: str, arguments: Callable[..., Any]) -> Any:
    """A metric of torchmetrics."""
    from torchmetrics import MeanSquaredError, R2Score
    from torchmetrics.classification import MulticlassAUROC

    from megakit.training import ValidationMetric

    made: Any = {"mse": MeanSquaredError, "r2": R2Score, "auroc": partial(MulticlassAUROC, 10)}
    return ValidationMetric(made[name](), arguments)


def train(
    folder: Path,
    forward: Any = with_report,
    masked: str = "",
    arguments: Callable[..., Any] | None = None,
    best_by: str = "val_loss",
) -> Any:
    """Fine-tunes two steps; returns the error, or the logged values, and the console's lines.

    Args:
        folder: Of the run.
        forward: Of the loss.
        masked: The part of the data that gets a mask, `train` or `val`.
        arguments: Those of a validation metric `own`.
        best_by: How the best checkpoint is chosen.
    """
    import model_components
    from megakit.job.console import Console
    from megakit.training import train

    sizes: dict[str, Any] = {
        "max_steps": 2,
        "val_interval": 1,
        "save_interval": 1,
        "best_by": best_by,
    }
    run, module, data, trainer = built(folder, **sizes)
    set_up, lines = data.setup, list[str]()

    def setup(stage: str) -> None:
        set_up(stage)
        if masked:
            setattr(data, f"{masked}_set", Masked(getattr(data, f"{masked}_set")))

    data.setup = setup
    if arguments:
        module.validation_metrics = lambda: {"own": metric("mse", arguments)}
    with (
        mock.patch.object(model_components.ClassifierLossReduction, "forward", forward),
        mock.patch.object(Console, "say", lambda self, line: lines.append(line)),
    ):
        try:
            train(model=module, data=data, trainer=trainer)
        except (UserError, IndexError) as error:
            return f"{type(error).__name__}: {error}", lines
        run.finish(trainer)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, lines


def flattened(batch: Any, output: Any) -> Any:
    return output.flatten(), output.flatten()


LOSS = "UserError: ClassifierLossReduction"
MASK = LOSS + ": the dataset returns a loss_mask.* Derive the loss from TokenMeanLossReduction"
MEANS = LOSS + r": the criterion returned (\S+) for .*'none' is (?!\1,).*TokenMeanLossReduction"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ((with_report, "train"), MASK),
        ((with_report, "val"), MASK),
        ((partialmethod(with_report, weight=[0.1] * 5 + [1.0] * 5),), MEANS),
        ((partialmethod(with_report, ignore_index=3),), MEANS),
        ((without_report,), LOSS + r" does not use batch\['loss_mask'\], so padding"),
        (
            (with_report, "", flattened),
            r"UserError: validation metric 'own': .* shapes \(640,\) and \(640,\), for 64 samples",
        ),
    ],
)
def test_what_is_refused(ranks: Ranks, tmp_path: Path, how: tuple[Any, ...], told: str) -> None:
    ((found, _),) = ranks.run(train, tmp_path, *how, world_size=1)
    assert re.match(told, str(found), re.DOTALL), found


def nan(batch: Any, output: Any) -> Any:
    return output / 0 * 0, output


def test_nan_is_named_and_chooses_no_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    arguments = (with_report, "", nan, "val_own")
    ((found, lines),) = ranks.run(train, tmp_path, *arguments, world_size=1)
    assert str(found["val_own"]) == "nan"
    (line,) = (one for one in lines if "NaN" in one)  # once, not at each validation
    assert line.startswith("Warning: val_own is NaN, ")
    summary = read_json(tmp_path / "finetune" / "summary.json")
    assert summary["checkpoint"] == summary["last_checkpoint"]


def validate(
    folder: Path, num: int, world_size: int = 1, limit: float = 1.0, forward: Any = with_report
) -> Any:
    """The values that `trainer.validate` logs for the first images and the initial weights."""
    import torch
    from torch.utils.data import Subset

    import model_components

    _, module, data, trainer = built(folder, world_size)
    set_up = data.setup

    def setup(stage: str) -> None:
        set_up(stage)
        data.val_set = Subset(data.val_set, range(num))

    data.setup = setup
    trainer.limit_val_batches = limit

    def vectors(batch: Any, output: Any) -> Any:
        return output, torch.nn.functional.one_hot(batch["label"], 10).float()

    module.validation_metrics = lambda: {
        "r2": metric("r2", vectors),
        "auroc": metric("auroc", lambda batch, output: (output, batch["label"])),
    }
    with mock.patch.object(model_components.ClassifierLossReduction, "forward", forward):
        trainer.validate(module, datamodule=data, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_metrics_whose_states_have_the_shape_of_the_samples(ranks: Ranks, tmp_path: Path) -> None:
    """Vectors, and a second rank without samples."""
    (alone,) = ranks.run(validate, tmp_path, 20, world_size=1)
    for found in ranks.run(validate, tmp_path, 20, 2, world_size=2):
        assert found == pytest.approx(alone, rel=1e-5)
    assert abs(alone["val_r2"]) > 1e-3 < alone["val_auroc"]


def test_a_share_of_the_batches_counts_each_sample_once(ranks: Ranks, tmp_path: Path) -> None:
    """Half of four batches, with and without the last, incomplete one."""
    for limit, number in ((0.5, 2), (1.0, 4)):
        (share,) = ranks.run(validate, tmp_path, 200, 1, limit, world_size=1)
        assert ranks.run(validate, tmp_path, 200, 1, number, world_size=1) == [share]


def test_a_loss_without_a_mask_is_right_without_padding(ranks: Ranks, tmp_path: Path) -> None:
    (exact,), (found,) = (
        ranks.run(validate, tmp_path, 128, 1, 1.0, forward, world_size=1)
        for forward in (with_report, without_report)
    )
    assert found == pytest.approx(exact, rel=1e-6)  # processors round the two sums differently
