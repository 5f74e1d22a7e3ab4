"""Values and predictions of a model over tokens are those of plain PyTorch, in every layout.

A validation's values are means over all its tokens. The functions below run in the pool's ranks.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakit.checkpoints import read_manifest
from megakit.job.layout import Layout
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.run_directory import Stage
from tests.parallel import jobs
from tests.scripts import read_csv

GLOBAL_BATCH = 6
#: Processes, tensor-parallel ranks, pipeline stages and micro batch size.
LAYOUTS = {
    "one process": Layout(1, 1, 1, 1, GLOBAL_BATCH, 3),
    "dp2": Layout(2, 1, 1, 1, GLOBAL_BATCH, 3),
    "tp2": Layout(2, 1, 2, 1, GLOBAL_BATCH, 3),
    "pp2": Layout(2, 1, 1, 2, GLOBAL_BATCH, 3),
    "pp2-dp2": Layout(4, 1, 1, 2, GLOBAL_BATCH, 1),
}
LONG = pytest.mark.long


def make_run(folder: Path, sizes: Layout, **training: Any) -> Any:
    """A run of a stage, which trains if there are options of a training."""
    kind = TrainingOptions if training else CommonOptions
    options = kind(output_dir=folder, precision="32", **training)
    return jobs.make_run(Stage("stage"), options, sizes, dataset="tokens")


def in_plain_torch() -> Any:
    """The losses of the initial weights, (N, S); NaN for padding."""
    from megakit.testing import distributed_model_parallel_state

    with distributed_model_parallel_state(accelerator="cpu"):
        from tests.parallel import masked_text

        module = masked_text.make_module()
        module.configure_model()
        return masked_text.exact_losses(module.module.eval())


def validate(sizes: Layout, folder: Path, is_own: bool = False) -> dict[str, float]:
    """The values that `trainer.validate` logs for the initial weights."""
    from examples.gpt.gpt_components import build_trainer
    from tests.parallel import masked_text

    trainer = build_trainer(make_run(folder, sizes))
    trainer.validate(masked_text.make_module(is_own), masked_text.make_data(sizes), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def train(sizes: Layout, folder: Path) -> dict[str, float]:
    """Trains for some steps; the logged values of the last weights, and their exact loss."""
    from torchmetrics import MeanMetric

    from examples.gpt.gpt_components import build_trainer
    from megakit.training import ValidationMetric, train
    from tests.parallel import masked_text

    def real_losses(batch: Any, losses: Any) -> Any:
        return losses, batch["loss_mask"] > 0

    module: Any = masked_text.make_module()
    metric = ValidationMetric(MeanMetric(), real_losses, higher_is_better=False)
    module.validation_metrics = lambda: {"mean": metric}
    intervals = {"max_steps": 4, "val_interval": 2, "save_interval": 2}
    how = {"global_batch_size": GLOBAL_BATCH, "best_by": "val_bits_per_byte"}
    run = make_run(folder, sizes, **intervals, **how)
    trainer = build_trainer(run)
    train(model=module, data=masked_text.make_data(sizes), trainer=trainer)
    values = trainer.callback_metrics.items()
    logged = {name: float(value) for name, value in values if name.startswith("val_")}
    return {**logged, "exact": float(np.nanmean(masked_text.exact_losses(module.module.eval())))}


def predict(sizes: Layout, folder: Path, sequence_parallel: bool) -> Any:
    """What `PredictionWriter` returns for the initial weights."""
    from examples.gpt.gpt_components import build_trainer
    from tests.parallel import masked_text

    run, module = make_run(folder, sizes), masked_text.make_module()
    trainer: Any = build_trainer(run, sequence_parallel=sequence_parallel)
    trainer.predict(module, masked_text.make_data(sizes))
    (writer,) = [each for each in trainer.callbacks if type(each).__name__ == "PredictionWriter"]
    return writer.outputs()


@pytest.fixture(scope="session")
def losses(ranks: Any) -> Any:
    (found,) = ranks.run(in_plain_torch, world_size=1)
    return found


def is_exactly(value: float) -> Any:
    return pytest.approx(value, abs=1e-6, rel=0)


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        *(("one process", False), ("pp2", False), ("pp2", True)),
        *(pytest.param(name, False, marks=LONG) for name in ("dp2", "tp2", "pp2-dp2")),
    ],
)
def test_every_layout(ranks: Any, losses: Any, tmp_path: Path, name: str, is_own: bool) -> None:
    """Also with a loss of another base class, which names its number of tokens."""
    sizes = LAYOUTS[name]
    expected = {
        "val_loss": is_exactly(np.nanmean(losses)),
        "val_bits_per_byte": is_exactly(np.nanmean(losses) / math.log(2)),
    }
    for found in ranks.run(validate, sizes, tmp_path, is_own, world_size=sizes.world_size):
        assert found == expected


@LONG
def test_a_training(ranks: Any, tmp_path: Path) -> None:
    """The number of tokens is no value of its own; a metric of torchmetrics is as exact."""
    for found in ranks.run(train, LAYOUTS["dp2"], tmp_path, world_size=2):
        exact = found.pop("exact")
        assert found == {
            "val_loss": is_exactly(exact),
            "val_bits_per_byte": is_exactly(exact / math.log(2)),
            "val_mean": pytest.approx(exact, abs=1e-5, rel=0),
        }
    rows = read_csv(tmp_path / "stage" / "metrics.csv")
    assert list(rows[0])[6:] == ["train_bits_per_byte", "val_bits_per_byte", "val_mean"]
    manifest = read_manifest(tmp_path / "stage" / "checkpoints" / "step=000004")
    assert manifest.val_loss == is_exactly(exact)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"), [("pp2", False), pytest.param("tp2", True, marks=LONG)]
)
def test_predictions(
    ranks: Any, losses: Any, tmp_path: Path, name: str, sequence_parallel: bool
) -> None:
    """Without labels, with a mask of tokens."""
    found, *others = ranks.run(predict, LAYOUTS[name], tmp_path, sequence_parallel, world_size=2)
    assert others == [None]
    assert found.idx.tolist() == list(range(33))
    expected = np.where(np.isnan(losses), found.output, losses)
    np.testing.assert_allclose(found.output, expected, atol=1e-5)
    assert found.label is found.latent is None
