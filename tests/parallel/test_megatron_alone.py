"""The chain on Megatron-Core alone: what test_layouts.py and tests/faults do not have."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megakit.job.layout import Layout
from tests.parallel import jobs
from tests.parallel.jobs import MEGATRON
from tests.parallel.test_layouts import alone, assert_same_metrics, predicted, training
from tests.scripts import read_csv

__all__ = ["alone", "training"]  # fixtures

LONG = pytest.mark.long
SHARED = ("use_distributed_optimizer",)
EIGHT = {"world_size": 8, "tensor": 2, "pipeline": 2}
HALVES = (slice(128), slice(128, 256))


@pytest.mark.usefixtures("megatron")
def test_equal_accuracies_are_equal_numbers() -> None:
    """Otherwise rounding decides for --stop-after and --best-by which of two is better."""
    import torch

    from examples.megatron.model_components import classification_loss
    from megakit.training.gathering import means_on_all_ranks

    weights, found = torch.full((256,), 1.28), set()
    weights[200:] = 0  # padding
    for first in range(128):  # of 127 images that are predicted right
        labels = torch.ones(256, dtype=torch.long)
        labels[first : first + 73] = 0
        batch: Any = {"label": labels, "loss_mask": weights}
        halves: Any = [{name: value[part] for name, value in batch.items()} for part in HALVES]
        logits = torch.eye(10)[[1] * 128]
        reports = [classification_loss(half, logits)[1] for half in halves]
        found.add(means_on_all_ranks("val_", reports)["val_accuracy"])
    assert [*found] == [pytest.approx(0.635)]


@pytest.mark.parametrize(
    ("saved", "package"), [("", MEGATRON), pytest.param(MEGATRON, "", marks=LONG)]
)
def test_a_checkpoint_of_the_other_chain(
    training: Any, ranks: Any, tmp_path: Path, saved: str, package: str
) -> None:
    """Fine-tuning and prediction start from it, as from one of their own; three ranks predict."""
    run, found = training(micro_batches=1, package=saved), []
    start = str(run.runs / "pretrain/checkpoints" / run.ranks[0].best)
    for kind, number, layout in (
        (saved, 1, jobs.layout()),
        (package, 3, Layout(3, 1, 1, 1, 21, 7)),
    ):
        how = (jobs.layout(), tmp_path / kind, 10, start, (), kind)
        (classifier,) = ranks.run(jobs.finetune, *how, world_size=1)
        if kind == saved:
            theirs = classifier
        found.append(predicted(ranks, layout, tmp_path / f"{number}", theirs, kind))
    tables = [read_csv(tmp_path / kind / "finetune/metrics.csv") for kind in (saved, package)]
    assert_same_metrics(*tables)
    (exact, expected), (rows, chances) = found
    assert [int(row[0]) for row in rows] == [*range(300)]  # 21 does not divide it
    assert rows == exact
    np.testing.assert_allclose(chances, expected, atol=1e-5)


def train(layout: Layout, folder: Path, precision: str, ddp: Any, resume: str | None) -> Any:
    """Four steps, or the last two of them; this rank's weights."""
    from megakit.checkpoints.store import CheckpointStore

    intervals = {"val_interval": 4, "save_interval": 2, "precision": precision, "resume": resume}
    with mock.patch.object(CheckpointStore, "_prune"):
        return jobs.pretrain(layout, folder, 4, ddp, MEGATRON, **intervals).last


@pytest.mark.parametrize(
    ("first", "then", "precision", "ddp"),
    [
        ({"world_size": 2}, {"world_size": 2}, "bf16-mixed", SHARED),
        pytest.param(EIGHT, EIGHT, "32", SHARED, marks=LONG),
        pytest.param(EIGHT, {"world_size": 2}, "32", SHARED, marks=LONG),
        pytest.param({}, {"world_size": 4, "pipeline": 2}, "32", SHARED, marks=LONG),
        pytest.param({}, {"world_size": 2, "tensor": 2}, "32", (), marks=LONG),
    ],
)
def test_resumption(
    ranks: Any, tmp_path: Path, first: Any, then: Any, precision: str, ddp: Any
) -> None:
    """Bit by bit in the same layout, and within rounding in another one."""
    folders, resume, weights = [], None, []
    for name, sizes in (("whole", first), ("resumed", then)):
        layout = jobs.layout(**sizes)
        how = (layout, tmp_path / name, precision, ddp, resume)
        weights.append(ranks.run(train, *how, world_size=layout.world_size))
        folders.append(tmp_path / name / "pretrain")
        resume = str(folders[0] / "checkpoints/step=000002")
    tables = [read_csv(folder / "metrics.csv") for folder in folders]
    assert [row["step"] for row in tables[0]] == ["1", "4"]
    if first != then:
        assert_same_metrics(*tables)
        return
    np.testing.assert_equal(*weights)
    saved = [sorted(folder.rglob("step=000004/weights/*.distcp")) for folder in folders]
    assert saved[0]
    for one, other in zip(*saved, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert tables[0] == tables[1]
