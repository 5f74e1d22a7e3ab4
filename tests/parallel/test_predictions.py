"""Predictions on disk are those in memory, under any layout and in any order of the samples.

`both_ways` runs in the pool's processes.
"""

from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
from numpy.typing import NDArray

from megakit.job.layout import Layout
from tests.parallel import jobs
from tests.parallel.test_layouts import LAYOUTS

Columns = dict[str, NDArray[np.generic]]


def both_ways(layout: Layout, folder: Path, in_order: bool) -> tuple[Columns, Columns, int] | None:
    """What `predict` and `predict_to_disk` return, and the number of batches that Lightning keeps.

    The rows on disk are divided into blocks of a few rows.
    """
    from unittest import mock

    from torch.utils.data import Subset

    from megakit.training import build_trainer, predict, predict_to_disk, sorted_rows
    from model_components import BionemoLightningModule, ExampleFineTuneConfig, MNISTDataModule
    from model_predict import PREDICT, PredictOptions

    class Data(MNISTDataModule):
        def setup(self, stage: str) -> None:
            super().setup(stage)
            order = np.arange(len(self.test_set))
            if not in_order:
                order = np.random.default_rng(0).permutation(order)
            self.test_set = Subset(self.test_set, order[:-7].tolist())

    options = PredictOptions(output_dir=folder, dataset="digits", precision="32")
    run = jobs.make_run(PREDICT, options, layout)
    size = layout.global_batch_size
    data = Data(folder, layout.micro_batch_size, dataset="digits", global_batch_size=size)
    module = BionemoLightningModule(config=ExampleFineTuneConfig(seed=1))
    in_memory = predict(model=module, data=data, trainer=build_trainer(run))
    trainer = build_trainer(run)
    with mock.patch.object(sorted_rows, "BLOCK_BYTES", 1000):
        stored = predict_to_disk(model=module, data=data, trainer=trainer, folder=folder / "parts")
        assert (in_memory is None) == (stored is None) == (not run.is_main)
        if in_memory is None or stored is None:
            return None
        blocks = [vars(block) for block in stored]
    assert len(stored) == len(in_memory.idx)
    assert len(blocks) > 10
    joined = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    return vars(in_memory), joined, len(trainer.predict_loop.predictions)


@pytest.mark.parametrize(
    ("name", "in_order"),
    [
        *(("one", True), ("one", False)),
        *(pytest.param(name, False, marks=pytest.mark.long) for name in ("tp2-dp2", "pp2-dp2")),
    ],
)
def test_on_disk_as_in_memory(ranks, tmp_path, name, in_order):
    cloudpickle.register_pickle_by_value(jobs)  # ranks cannot import it, nor this module
    layout = jobs.layout(**LAYOUTS.get(name, {}))
    told, *others = ranks.run(both_ways, layout, tmp_path, in_order, world_size=layout.world_size)
    assert others == [None] * (layout.world_size - 1)
    in_memory, on_disk, num_kept = told
    order = np.argsort(in_memory["idx"])
    assert on_disk.keys() == in_memory.keys() == {"idx", "label", "output", "latent"}
    for column, values in on_disk.items():
        assert values.dtype == in_memory[column].dtype
        assert np.array_equal(values, in_memory[column][order])
    assert len(on_disk["idx"]) == 293
    assert (np.diff(on_disk["idx"]) > 0).all()
    assert np.ptp(on_disk["output"], axis=0).max() > 0.01
    assert num_kept <= 1
    # Ranks with equal outputs do not write.
    data_ranks = layout.world_size // (layout.tensor * layout.pipeline)
    assert len(list((tmp_path / "parts").iterdir())) == data_ranks
