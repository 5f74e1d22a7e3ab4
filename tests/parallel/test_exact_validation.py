"""Values and predictions of a model over tokens are those of plain PyTorch, in every layout.

A validation's values are means over all its tokens. The functions below run in the pool's ranks.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakit.job.layout import Layout
from megakit.job.options import CommonOptions
from megakit.job.run_directory import Stage
from tests.parallel import jobs

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


def make_run(folder: Path, sizes: Layout) -> Any:
    options = CommonOptions(output_dir=folder, precision="32")
    return jobs.make_run(Stage("stage"), options, sizes, dataset="tokens")


def in_plain_torch() -> Any:
    """The losses of the initial weights, (N, S); NaN for padding."""
    from megakit.testing import distributed_model_parallel_state

    with distributed_model_parallel_state(accelerator="cpu"):
        from tests.parallel import masked_text

        module = masked_text.make_module()
        module.configure_model()
        return masked_text.exact_losses(module.module.eval())


def validate(sizes: Layout, folder: Path) -> dict[str, float]:
    """The values that `trainer.validate` logs for the initial weights."""
    from examples.gpt.gpt_components import build_trainer
    from tests.parallel import masked_text

    trainer = build_trainer(make_run(folder, sizes))
    trainer.validate(masked_text.make_module(), masked_text.make_data(sizes), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def predict(sizes: Layout, folder: Path, sequence_parallel: bool) -> Any:
    """What `PredictionWriter` returns for the initial weights."""
    from examples.gpt.gpt_components import build_trainer
    from tests.parallel import masked_text

    run, module = make_run(folder, sizes), masked_text.make_module()
    trainer: Any = build_trainer(run, sequence_parallel=sequence_parallel)
    trainer.predict(module, masked_text.make_data(sizes))
    (writer,) = [each for each in trainer.callbacks if type(each).__name__ == "PredictionWriter"]
    outputs = writer.outputs()
    return outputs and (outputs.idx, outputs.output, outputs.label, outputs.latent)


@pytest.fixture(scope="session")
def losses(ranks: Any) -> Any:
    (found,) = ranks.run(in_plain_torch, world_size=1)
    return found


def is_exactly(value: float) -> Any:
    return pytest.approx(value, abs=1e-6, rel=0)


@pytest.mark.parametrize(
    "name",
    [
        *("one process", "pp2"),
        *(pytest.param(name, marks=LONG) for name in ("dp2", "tp2", "pp2-dp2")),
    ],
)
def test_every_layout(ranks: Any, losses: Any, tmp_path: Path, name: str) -> None:
    sizes = LAYOUTS[name]
    expected = {
        "val_loss": is_exactly(np.nanmean(losses)),
        "val_bits_per_byte": is_exactly(np.nanmean(losses) / math.log(2)),
    }
    for found in ranks.run(validate, sizes, tmp_path, world_size=sizes.world_size):
        assert found == expected


@pytest.mark.parametrize(
    ("name", "sequence_parallel"), [("pp2", False), pytest.param("tp2", True, marks=LONG)]
)
def test_predictions(
    ranks: Any, losses: Any, tmp_path: Path, name: str, sequence_parallel: bool
) -> None:
    """Without labels, with a mask of tokens."""
    found, *others = ranks.run(predict, LAYOUTS[name], tmp_path, sequence_parallel, world_size=2)
    assert others == [None]
    idx, output, label, latent = found
    assert idx.tolist() == list(range(33))
    expected = np.where(np.isnan(losses), output, losses)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert label is latent is None
