"""Each sample is predicted exactly once, under any layout and in any order of the samples.

`classify` and `regress` run in the pool's processes.
"""

import csv
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from megakit.job.layout import Layout
from tests.parallel import jobs
from tests.parallel.test_layouts import LAYOUTS


def classify(layout: Layout, folder: Path, in_order: bool) -> Any:
    """The stored outputs in blocks of a few rows, and the number of batches that Lightning keeps.

    Seven of the test images are left out, so that the last batch has padding.
    """
    from unittest import mock

    from torch.utils.data import Subset

    from megakit.training import prediction
    from model_components import (
        BionemoLightningModule,
        ExampleFineTuneConfig,
        MNISTDataModule,
        build_trainer,
    )
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
    trainer = build_trainer(run)
    trainer.predict(BionemoLightningModule(config=ExampleFineTuneConfig(seed=1)), data)
    (writer,) = [each for each in trainer.callbacks if type(each).__name__ == "PredictionWriter"]
    with mock.patch.object(prediction, "BLOCK_BYTES", 1000):
        stored = writer.outputs()
        blocks = stored and [vars(block) for block in stored]
    return blocks, len(trainer.predict_loop.predictions)


def test_each_sample_once(ranks, tmp_path):
    """One process with the samples in order is what all layouts are compared with."""
    cloudpickle.register_pickle_by_value(jobs)  # ranks cannot import it, nor this module
    found = {}
    for name, in_order in (("one", True), ("dp2", False), ("pp2", False)):
        layout, folder = jobs.layout(**LAYOUTS.get(name, {})), tmp_path / name
        (blocks, *kept), *others = ranks.run(
            classify, layout, folder, in_order, world_size=layout.world_size
        )
        assert [blocks for blocks, _ in others] == [None] * (layout.world_size - 1)
        assert max(*kept, *(number for _, number in others), 0) <= 1
        assert len(blocks) > 10
        columns = {key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]}
        assert columns.keys() == {"idx", "label", "output", "latent"}
        assert len(columns["idx"]) == 293
        assert (np.diff(columns["idx"]) > 0).all()
        assert np.ptp(columns["output"], axis=0).max() > 0.01
        # Ranks with equal outputs do not write.
        files = list((folder / "predict" / ".outputs.partial").iterdir())
        assert len(files) == layout.world_size // (layout.tensor * layout.pipeline)
        found[name] = dict(zip(columns["idx"].tolist(), columns["output"], strict=True))
    common = found["one"].keys() & found["dp2"].keys()
    assert found["dp2"].keys() == found["pp2"].keys()
    assert len(common) >= 286
    for name in ("dp2", "pp2"):
        expected, own = ([found[key][idx] for idx in common] for key in ("one", name))
        np.testing.assert_allclose(own, expected, atol=1e-5)


def regress(layout: Layout, folder: Path) -> Any:
    """Predicts one number for each image: the first of the classifier's logits."""
    from megatron.core import parallel_state

    from model_components import (
        BionemoLightningModule,
        ExampleFineTuneConfig,
        MNISTDataModule,
        build_trainer,
    )
    from model_predict import PREDICT, PredictOptions

    class Regression(BionemoLightningModule):
        def predict_step(self, batch, batch_idx=None):
            outputs = super().predict_step(batch, batch_idx)
            if parallel_state.is_pipeline_last_stage():
                outputs["output"] = outputs["output"][:, :1]
            return outputs

    options = PredictOptions(output_dir=folder, dataset="digits", precision="32")
    run = jobs.make_run(PREDICT, options, layout)
    size = layout.global_batch_size
    data = MNISTDataModule(
        folder, layout.micro_batch_size, dataset="digits", global_batch_size=size
    )
    trainer = build_trainer(run)
    trainer.predict(Regression(config=ExampleFineTuneConfig(seed=1)), data)
    return run.finish(trainer, rows=lambda block: {"value": block.output[:, 0]})


def test_a_regression(ranks, tmp_path):
    cloudpickle.register_pickle_by_value(jobs)
    tables = {}
    for name in ("one", "pp2"):
        layout, folder = jobs.layout(**LAYOUTS.get(name, {})), tmp_path / name
        paths = ranks.run(regress, layout, folder, world_size=layout.world_size)
        assert {*paths} == {folder / "predict" / "predictions.csv"}
        with paths[0].open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["idx", "value"]
        assert [int(row[0]) for row in rows] == list(range(300))
        tables[name] = [float(row[1]) for row in rows]
        hidden = [path.name for path in (folder / "predict").glob(".*")]
        assert hidden == []
    np.testing.assert_allclose(tables["one"], tables["pp2"], atol=1e-5)
    assert np.ptp(tables["one"]) > 0.01
