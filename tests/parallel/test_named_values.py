"""Values that a loss and a metric name: the same under every layout, and exact.

Real processes, NeMo's strategy, the script's own work, in float32. `train` and `in_plain_torch` run
in the pool's processes.
"""

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.parallel import jobs
from tests.scripts import read_csv, read_json

LAYOUTS: dict[str, dict[str, int]] = {
    "4 micro batches": {"micro_batches": 4},
    "tp2": {"world_size": 2, "tensor": 2},
    "pp2-dp2": {"world_size": 4, "pipeline": 2},
}
COLUMNS = ["train_margin", "val_margin", "val_accuracy"]


def margin_too(self: Any, batch: Any, forward_out: Any) -> Any:
    """A loss with a further value, as a reader would write it."""
    import torch

    top = forward_out.float().topk(2, dim=1).values
    criterion = torch.nn.functional.cross_entropy
    margin = top[:, 0] - top[:, 1]
    return self.report(criterion, forward_out, batch["label"], batch, margin=margin)


def train(layout: Any, folder: Path) -> dict[str, float]:
    """Fine-tunes until the margin of a validation is no better than that of the one before.

    Returns the step at which this rank stopped, and what Lightning has logged there.
    """
    import model_finetune as script
    from megakit.training import train
    from model_components import ClassifierLossReduction

    sizes = {"lr": 0.05, "max_steps": 200, "val_interval": 5, "save_interval": 200}
    how = {"checkpoint": "none", "best_by": "val_margin", "stop_after": 1}
    run = jobs.make_run(
        script.FINETUNE, jobs.options_of("finetune", folder, **sizes, **how), layout
    )
    with (
        mock.patch.object(ClassifierLossReduction, "forward", margin_too),
        mock.patch.object(ClassifierLossReduction, "higher_is_better", {"margin"}, create=True),
    ):
        module, data, trainer = jobs.built_by(script.finetune, run)
        train(model=module, data=data, trainer=trainer)
        run.finish(trainer)
    values = trainer.callback_metrics.items()
    logged = {name: float(value) for name, value in values if name.startswith("val_")}
    return {"step": trainer.global_step, **logged}


def in_plain_torch(checkpoint: str) -> list[float]:
    """The last checkpoint's values for the 200 images in one batch, without any padding."""
    import torch

    import model_components as model_components  # the checkpoint names its config
    from megakit.models import load_for_inference
    from megakit.testing import distributed_model_parallel_state
    from mnist.files import read_digits

    with distributed_model_parallel_state():
        images, numbers = read_digits("validation")
        model = load_for_inference(checkpoint)
        with torch.no_grad():
            logits = model(torch.from_numpy(images).float().div(255).unsqueeze(1))
        labels = torch.from_numpy(numbers).long()
        top = logits.topk(2, dim=1).values
        right = (logits.argmax(dim=1) == labels).float().mean()
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return [float((top[:, 0] - top[:, 1]).mean()), float(right), float(loss)]


class Run:
    """One training, and what it left behind."""

    def __init__(self, ranks: Any, folder: Path, **layout: int) -> None:
        sizes = jobs.layout(**layout)
        self.seen = ranks.run(train, sizes, folder, world_size=sizes.world_size)
        self.rows = read_csv(folder / "finetune" / "metrics.csv")
        self.summary = read_json(folder / "finetune" / "summary.json")

    def column(self, name: str) -> dict[int, float]:
        return {int(row["step"]): float(row[name]) for row in self.rows if row[name]}


@pytest.fixture(scope="session")
def training(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda **layout: Run(ranks, tmp_path_factory.mktemp("values"), **layout))


@pytest.fixture
def alone(training: Any) -> Run:
    run: Run = training(micro_batches=1)
    return run


def test_values_are_exact_and_choose_the_best(alone: Run, ranks: Any) -> None:
    assert list(alone.rows[0])[6:] == COLUMNS
    assert alone.summary["steps"] == list(alone.column("val_margin"))[-1] < 200
    (expected,) = ranks.run(in_plain_torch, alone.summary["last_checkpoint"], world_size=1)
    last = alone.rows[-1]
    found = [float(last[name]) for name in ("val_margin", "val_accuracy", "val_loss")]
    assert found == pytest.approx(expected, rel=1e-5)
    margins = alone.column("val_margin")
    best = max(margins, key=lambda step: margins[step])
    assert alone.summary["checkpoint"].endswith(f"step={best:06}")


@pytest.mark.parametrize(
    "name", ["4 micro batches", "tp2", pytest.param("pp2-dp2", marks=pytest.mark.long)]
)
def test_every_layout(alone: Run, training: Any, name: str) -> None:
    run = training(**LAYOUTS[name])
    # Every rank stops after the same step, which is that of one process.
    assert {seen["step"] for seen in run.seen} == {alone.summary["steps"]}
    assert list(run.rows[0]) == list(alone.rows[0])
    for column in ("train_loss", "val_loss", *COLUMNS):
        expected, found = alone.column(column), run.column(column)
        assert list(found) == list(expected)
        np.testing.assert_allclose(
            list(found.values()), list(expected.values()), rtol=2e-4, atol=1e-6, err_msg=column
        )
    # Ranks that differed in a value would differ in the best checkpoint, or in when they stop.
    assert all(seen == run.seen[0] for seen in run.seen)
    for name in ("checkpoint", "last_checkpoint"):
        assert Path(run.summary[name]).name == Path(alone.summary[name]).name
