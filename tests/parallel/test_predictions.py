"""Each sample is predicted exactly once, in any layout and any order, and by any kind of model."""

import numpy as np
import pytest

from tests.parallel import jobs
from tests.parallel.test_layouts import LAYOUTS


def predict(layout, folder):
    """A regression of shuffled samples, as many as leave padding in the last batch."""
    from megatron.core import parallel_state
    from torch.utils.data import Subset

    from model_components import (
        BionemoLightningModule,
        ExampleFineTuneConfig,
        MNISTDataModule,
        build_trainer,
    )
    from model_predict import PREDICT

    class Data(MNISTDataModule):
        def setup(self, stage):
            super().setup(stage)
            order = np.random.default_rng(0).permutation(len(self.test_set))
            self.test_set = Subset(self.test_set, order[:-7].tolist())

    class Module(BionemoLightningModule):
        def predict_step(self, batch, batch_idx=None):
            outputs = super().predict_step(batch, batch_idx)
            if parallel_state.is_pipeline_last_stage():
                outputs["output"] = outputs["output"][:, :1]
            return outputs

    run = jobs.make_run(PREDICT, jobs.options_of("predict", folder), layout)
    size = layout.global_batch_size
    data = Data(folder, layout.micro_batch_size, dataset="digits", global_batch_size=size)
    trainer = build_trainer(run)
    trainer.predict(Module(config=ExampleFineTuneConfig(seed=1)), data)
    return run.finish(trainer, rows=lambda block: {"value": block.output[:, 0]})


@pytest.fixture(scope="module")
def expected(ranks, tmp_path_factory):
    return table(ranks, {}, tmp_path_factory.mktemp("one"))


def table(ranks, layout, folder):
    sizes = jobs.layout(**layout)
    path, *_ = ranks.run(predict, sizes, folder, world_size=sizes.world_size)
    header, *lines = path.read_text().splitlines()
    assert header == "idx,value"
    assert list(path.parent.glob(".*")) == []
    return np.loadtxt(lines, delimiter=",")


@pytest.mark.parametrize("name", ["dp2", "pp2"])
def test_a_regression(ranks, expected, tmp_path, name):
    assert len(expected) == len({*expected[:, 0]}) == 293
    assert (np.diff(expected[:, 0]) > 0).all()
    assert np.ptp(expected[:, 1]) > 0.01
    np.testing.assert_allclose(table(ranks, LAYOUTS[name], tmp_path), expected, atol=1e-5)
