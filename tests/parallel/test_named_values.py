"""Values that a loss, a metric and a callback name: the same under every layout, and exact.

Real processes, NeMo's strategy, the script's own work, in float32. The functions below run in the
pool's processes.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.left_behind import curves
from tests.parallel import jobs
from tests.scripts import read_csv, read_json

LAYOUTS: dict[str, dict[str, int]] = {
    "4 micro batches": {"micro_batches": 4},
    "tp2": {"world_size": 2, "tensor": 2},
    "pp2-dp2": {"world_size": 4, "pipeline": 2},
}
COLUMNS = ["train_margin", "val_margin", "val_accuracy", "val_twice"]


@dataclass(frozen=True)
class Seen:
    """The step at which one rank stopped, and what Lightning has there as logged at the end."""

    step: int
    logged: dict[str, float]


@contextlib.contextmanager
def more_values() -> Iterator[None]:
    """A loss with a further value, as a reader would write it."""
    from model_components import ClassifierLossReduction

    def forward(self: Any, batch: Any, forward_out: Any) -> Any:
        import torch

        top = forward_out.float().topk(2, dim=1).values
        margin = top[:, 0] - top[:, 1]
        criterion = torch.nn.functional.cross_entropy
        return self.report(criterion, forward_out, batch["label"], batch, margin=margin)

    with (
        mock.patch.object(ClassifierLossReduction, "forward", forward),
        mock.patch.object(ClassifierLossReduction, "higher_is_better", {"margin"}, create=True),
    ):
        yield


def train(layout: Any, folder: Path) -> Seen:
    """Fine-tunes until the margin of a validation is no better than that of the one before."""
    import lightning.pytorch as pl

    import model_components
    import model_finetune as script

    options = script.FinetuneOptions(
        output_dir=folder,
        dataset="digits",
        precision="32",
        checkpoint="none",
        lr=0.05,
        max_steps=200,
        global_batch_size=jobs.GLOBAL_BATCH,
        val_interval=5,
        save_interval=200,
        best_by="val_margin",
        stop_after=1,
    )

    class Twice(pl.Callback):
        """Logs a value of its own."""

        trainer: Any = None

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.trainer = trainer
            accuracy = trainer.callback_metrics["val_accuracy"]
            pl_module.log("val_twice", 2 * accuracy, logger=False)

        def __deepcopy__(self, memo: object) -> "Twice":
            return self

    twice, build_trainer = Twice(), model_components.build_trainer

    def with_callbacks(run: Any, callbacks: Any = ()) -> Any:
        return build_trainer(run, [*callbacks, twice])

    with more_values(), mock.patch.object(model_components, "build_trainer", with_callbacks):
        script.finetune(jobs.make_run(script.FINETUNE, options, layout))
    logged = {name: float(value) for name, value in twice.trainer.callback_metrics.items()}
    return Seen(twice.trainer.global_step, logged)


class Run:
    """One training, and what it left behind."""

    def __init__(self, ranks: Any, folder: Path, **layout: int) -> None:
        sizes = jobs.layout(**layout)
        self.seen = ranks.run(train, sizes, folder, world_size=sizes.world_size)
        self.path = folder / "finetune"
        self.rows = read_csv(self.path / "metrics.csv")
        self.summary = read_json(self.path / "summary.json")

    def column(self, name: str) -> dict[int, float]:
        return {int(row["step"]): float(row[name]) for row in self.rows if row[name]}


@pytest.fixture(scope="session")
def training(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def train(**layout: int) -> Run:
        return Run(ranks, tmp_path_factory.mktemp("values"), **layout)

    return train


@pytest.fixture
def alone(training: Any) -> Run:
    run: Run = training(micro_batches=1)
    return run


def test_columns_curves_and_which_steps_have_values(alone: Run) -> None:
    assert list(alone.rows[0])[6:] == COLUMNS
    steps = [int(row["step"]) for row in alone.rows]
    assert list(alone.column("train_margin")) == steps
    validated = list(alone.column("val_loss"))
    for name in COLUMNS[1:]:
        assert list(alone.column(name)) == validated
    assert alone.summary["steps"] == steps[-1] == validated[-1] < 200
    assert alone.summary["metrics"].keys() == set(COLUMNS)
    twice = [value / 2 for value in alone.column("val_twice").values()]
    assert list(alone.column("val_accuracy").values()) == pytest.approx(twice)
    found = curves(alone.path / "tensorboard")
    for column in COLUMNS:
        part, _, name = column.partition("_")
        curve = found[f"{part.replace('val', 'validation')}/finetune/{name}"]
        assert dict(curve) == pytest.approx(alone.column(column))


def test_values_are_those_of_plain_torch(alone: Run, ranks: Any) -> None:
    """The last checkpoint's logits of the 200 images in one batch, without any padding."""
    (expected,) = ranks.run(in_plain_torch, alone.summary["last_checkpoint"], world_size=1)
    last = alone.rows[-1]
    found = [float(last[name]) for name in ("val_margin", "val_accuracy", "val_loss")]
    assert found == pytest.approx(expected, rel=1e-5)


def in_plain_torch(checkpoint: str) -> list[float]:
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


@pytest.mark.parametrize(
    "name", ["4 micro batches", "tp2", pytest.param("pp2-dp2", marks=pytest.mark.long)]
)
def test_every_layout(alone: Run, training: Any, name: str) -> None:
    run = training(**LAYOUTS[name])
    # Every rank stops after the same step, which is that of one process.
    assert {seen.step for seen in run.seen} == {alone.summary["steps"]}
    assert list(run.rows[0]) == list(alone.rows[0])
    for column in ("train_loss", "val_loss", *COLUMNS):
        expected, found = alone.column(column), run.column(column)
        assert list(found) == list(expected)
        np.testing.assert_allclose(
            list(found.values()), list(expected.values()), rtol=2e-4, atol=1e-6, err_msg=column
        )
    # Ranks that differed in a value would differ in the best checkpoint, or in when they stop.
    logged = [{k: v for k, v in seen.logged.items() if k.startswith("val_")} for seen in run.seen]
    assert all(values == logged[0] for values in logged)
    assert logged[0].keys() >= {"val_loss", *COLUMNS[1:]}
    names = [Path(run.summary[key]).name for key in ("checkpoint", "last_checkpoint")]
    assert names == [Path(alone.summary[key]).name for key in ("checkpoint", "last_checkpoint")]


def test_a_value_of_the_loss_may_choose_and_say_that_higher_is_better(alone: Run) -> None:
    from megakit.checkpoints import best_checkpoint, read_manifest

    best = best_checkpoint(alone.path / "checkpoints", "val_margin")
    assert best is not None
    assert str(best) == alone.summary["checkpoint"]
    assert read_manifest(best).higher_is_better
    highest = max(alone.column("val_margin").values())
    assert read_manifest(best).values["val_margin"] == pytest.approx(highest)
