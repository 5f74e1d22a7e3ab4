"""Tensor, pipeline and data parallelism at once, with what Megatron overlaps: the three scripts.

Eight ranks against one process, in float32. test_layouts.py has them, too, and so has
test_gpt_layouts.py.
"""

import numpy as np
import pytest

from tests.parallel import jobs
from tests.parallel.test_layouts import (
    STEPS,
    TOLERANCE,
    alone,
    assert_same_metrics,
    predicted,
    shard,
    training,
)
from tests.scripts import read_csv, run_script

__all__ = ["alone", "training"]  # fixtures

pytestmark = pytest.mark.long

DISTRIBUTED, REDUCE, GATHER = (
    *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
)


def fine_tuned_and_predicted(ranks, trained, folder, ddp=()):
    """What a pretraining's ranks, and one process, predict with the classifier of these ranks."""
    start = trained.runs / "pretrain" / "checkpoints" / trained.ranks[0].best
    how = (trained.layout, folder, 10, str(start), ddp)
    classifier = ranks.run(jobs.finetune, *how, world_size=trained.layout.world_size)[0]
    layouts = (trained.layout, jobs.layout())
    return [predicted(ranks, layout, folder, classifier) for layout in layouts]


@pytest.mark.parametrize("ddp", [(REDUCE,), (DISTRIBUTED, REDUCE, GATHER)], ids=len)
def test_what_overlaps(alone, training, ranks, tmp_path, ddp):
    """Pretraining, fine-tuning from its checkpoint, and prediction, each with the same ranks."""
    run = training(world_size=8, tensor=2, pipeline=2, micro_batches=4, ddp=ddp)
    for rank in run.ranks:  # what is asked for is done: else equal losses would prove nothing
        assert {part.shape for part in rank.samples} == {(4, 8, 2)}  # four micro batches
        assert (rank.optimizer == "DistributedOptimizer") == (DISTRIBUTED in ddp)
        assert (rank.buckets > 1) == (rank.place[1] == 0)
        assert rank.gathers_late == (GATHER in ddp)
    (expected,) = alone.losses()
    assert run.losses()
    for losses in run.losses():
        np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    assert_same_metrics(run.metrics, alone.metrics)
    (whole,) = (rank.last for rank in alone.ranks)
    for rank in run.ranks:
        for key, weight in rank.last.items():
            part = shard(whole[key], key, rank.place[0], tensor=2)
            assert np.abs(weight - part).max() <= TOLERANCE * np.abs(part).max(), key

    (exact, chances), _ = fine_tuned_and_predicted(ranks, alone, tmp_path / "one")
    assert np.ptp(chances, axis=0).max() > 0.1  # it tells images apart
    for rows, probabilities in fine_tuned_and_predicted(ranks, run, tmp_path / "eight", ddp):
        assert rows == exact
        np.testing.assert_allclose(probabilities, chances, atol=TOLERANCE)
    one, eight = (read_csv(tmp_path / name / "finetune/metrics.csv") for name in ("one", "eight"))
    assert_same_metrics(eight, one)


def test_the_script_starts_eight_processes(alone, tmp_path):
    """Its options give the layout that the other tests give the ranks."""
    layout = ("--devices", 8, "--tensor-parallel", 2, "--pipeline-parallel", 2)
    data = ("--dataset", "digits", "--data-dir", tmp_path / "no-data", "--precision", "32")
    sizes = ("--global-batch-size", jobs.GLOBAL_BATCH, "--micro-batch-size", 8, "--lr", "0.001")
    steps = ("--max-steps", STEPS, "--val-interval", STEPS // 2, "--save-interval", STEPS)
    place = ("--accelerator", "cpu", "--output-dir", tmp_path)
    done = run_script("model_pretrain.py", *layout, *data, *sizes, *steps, *place)
    assert done.output() == f"{tmp_path}/pretrain/checkpoints/step={STEPS:06}\n"
    assert "8 processes: tensor 2 x pipeline 2 x data 2" in done.err
    assert_same_metrics(read_csv(tmp_path / "pretrain" / "metrics.csv"), alone.metrics)
