"""Each sample is predicted exactly once, under any layout and in any order of the samples.

`predict` runs in the pool's processes.
"""

import numpy as np

from tests.parallel import jobs
from tests.parallel.test_layouts import LAYOUTS


def predict(layout, folder, in_order=True, rows=None):
    """The stored outputs in blocks of a few rows, or the path of predictions.csv.

    Seven of the test images are left out, so that the last batch has padding. With `rows`, the
    model is a regression, and its only output is the first logit.
    """
    from unittest import mock

    from megatron.core import parallel_state
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
        def setup(self, stage):
            super().setup(stage)
            order = np.arange(len(self.test_set))
            if not in_order:
                order = np.random.default_rng(0).permutation(order)
            self.test_set = Subset(self.test_set, order[:-7].tolist())

    class Module(BionemoLightningModule):
        def predict_step(self, batch, batch_idx=None):
            outputs = super().predict_step(batch, batch_idx)
            if rows is not None and parallel_state.is_pipeline_last_stage():
                outputs["output"] = outputs["output"][:, :1]
            return outputs

    options = PredictOptions(output_dir=folder, dataset="digits", precision="32")
    run = jobs.make_run(PREDICT, options, layout)
    size = layout.global_batch_size
    data = Data(folder, layout.micro_batch_size, dataset="digits", global_batch_size=size)
    trainer = build_trainer(run)
    trainer.predict(Module(config=ExampleFineTuneConfig(seed=1)), data)
    assert len(trainer.predict_loop.predictions) <= 1
    if rows is not None:
        return run.finish(trainer, rows=rows)
    (writer,) = [each for each in trainer.callbacks if type(each).__name__ == "PredictionWriter"]
    with mock.patch.object(prediction, "BLOCK_BYTES", 1000):
        stored = writer.outputs()
        return stored and [vars(block) for block in stored]


def run_layout(ranks, name, folder, *arguments):
    layout = jobs.layout(**LAYOUTS.get(name, {}))
    return ranks.run(predict, layout, folder, *arguments, world_size=layout.world_size)


def test_each_sample_once(ranks, tmp_path):
    """One process with the samples in order is what all layouts are compared with."""
    outputs = {}
    for name, in_order, num_files in (("one", True, 1), ("dp2", False, 2), ("pp2", False, 1)):
        blocks, *others = run_layout(ranks, name, tmp_path / name, in_order)
        assert others == [None] * len(others)
        assert len(blocks) > 10
        columns = {key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]}
        assert columns.keys() == {"idx", "label", "output", "latent"}
        assert len(columns["idx"]) == 293
        assert (np.diff(columns["idx"]) > 0).all()
        # Ranks with equal outputs do not write.
        assert len(list((tmp_path / name / "predict" / ".outputs.partial").iterdir())) == num_files
        outputs[name] = dict(zip(columns["idx"].tolist(), columns["output"], strict=True))
    assert outputs["dp2"].keys() == outputs["pp2"].keys()
    common = sorted(outputs["one"].keys() & outputs["dp2"].keys())
    expected, *found = (np.array([rows[idx] for idx in common]) for rows in outputs.values())
    assert np.ptp(expected, axis=0).max() > 0.01
    for own in found:
        np.testing.assert_allclose(own, expected, atol=1e-5)


def value(block):
    return {"value": block.output[:, 0]}


def test_a_regression_under_a_pipeline(ranks, tmp_path):
    (path, *_) = run_layout(ranks, "pp2", tmp_path, True, value)
    header, *lines = path.read_text().splitlines()
    assert header == "idx,value"
    table = np.loadtxt(lines, delimiter=",")
    assert table[:, 0].tolist() == list(range(293))
    assert np.ptp(table[:, 1]) > 0.01
    assert list(path.parent.glob(".*")) == []
