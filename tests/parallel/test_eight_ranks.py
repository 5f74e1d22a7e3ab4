"""Tensor, pipeline and data parallelism at once, with and without what Megatron overlaps.

Eight ranks against one process, in float32: the tutorial's three scripts, and examples/gpt.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megakit.testing import Ranks
from tests.parallel import gpt_example, jobs
from tests.parallel.gpt_example import Case
from tests.parallel.test_layouts import TOLERANCE, shard
from tests.scripts import read_csv, run_script

pytestmark = pytest.mark.long

STEPS = 10
ALL = {"world_size": 8, "tensor": 2, "pipeline": 2, "micro_batches": 4}
DISTRIBUTED, REDUCE, GATHER = (
    *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
)
DDP = {
    "plain": (),
    "overlap": (REDUCE,),
    "distributed": (DISTRIBUTED,),
    "distributed-overlap": (DISTRIBUTED, REDUCE, GATHER),
}
GPT = {
    name: Case(
        *(2, 2, 2),
        sequence_parallel=True,
        distributed_optimizer=DISTRIBUTED in ddp,
        overlap=REDUCE in ddp,
    )
    for name, ddp in DDP.items()
}
BOTH = GPT["distributed-overlap"]
COLUMNS = ("train_loss", "val_loss", "grad_norm")


@pytest.fixture(scope="module")
def ranks():
    with Ranks(8, timeout=300) as pool:
        yield pool


class Chain:
    """Pretraining, fine-tuning from its checkpoint, and prediction, each with the same ranks."""

    def __init__(self, ranks, folder, ddp=(), **layout):
        sizes = jobs.layout(**layout)

        def run(job, *arguments):
            return ranks.run(job, sizes, folder, *arguments, world_size=sizes.world_size)

        self.ranks = run(jobs.pretrain, STEPS, ddp)
        start = folder / "pretrain" / "checkpoints" / self.ranks[0].best
        self.classifier = run(jobs.finetune, STEPS, str(start), ddp)[0]
        self.predictions = Path(run(jobs.predict, self.classifier)[0])
        self.metrics = {
            stage: read_csv(folder / stage / "metrics.csv") for stage in ("pretrain", "finetune")
        }


def probabilities(path):
    """Index, label and prediction of each row; and the probabilities."""
    rows = read_csv(path)
    exact = [(row["idx"], row["label"], row["prediction"]) for row in rows]
    return exact, np.array([[float(row[f"p{k}"]) for k in range(10)] for row in rows])


def assert_near(found, expected, what, relative=TOLERANCE):
    """Compares all numbers; with `-s`, pytest shows the largest relative difference."""
    found, expected = np.array(found, float), np.array(expected, float)
    assert found.shape == expected.shape
    assert found.size
    print(f"{what}: {np.abs(found / expected - 1).max():.1e}")
    np.testing.assert_allclose(found, expected, rtol=relative, err_msg=what)


def assert_same_metrics(rows, expected, columns=COLUMNS):
    for column in columns:
        here, there = ([row[column] for row in table if row[column]] for table in (rows, expected))
        assert_near(here, there, column)


@pytest.fixture(scope="module")
def chain(ranks, tmp_path_factory):
    @cache
    def make(name):
        ddp, layout = ((), {"micro_batches": 1}) if name == "one" else (DDP[name], ALL)
        return Chain(ranks, tmp_path_factory.mktemp(name), ddp, **layout)

    return make


@pytest.mark.parametrize("name", DDP)
class TestTutorial:
    def test_what_is_asked_for_is_done(self, chain, name):
        """Else equal losses would prove nothing."""
        for rank in chain(name).ranks:
            assert {part.shape for part in rank.samples} == {(4, 8, 2)}  # four micro batches
            is_distributed = rank.optimizer == "DistributedOptimizer"
            assert is_distributed == (DISTRIBUTED in DDP[name])
            assert (rank.buckets > 1) == (REDUCE in DDP[name] and rank.place[1] == 0)
            assert rank.gathers_late == (GATHER in DDP[name])
        assert [rank.place for rank in chain(name).ranks] == [
            (tensor, pipeline, data) for pipeline in (0, 1) for data in (0, 1) for tensor in (0, 1)
        ]

    def test_losses_and_gradients(self, chain, name):
        alone, here = chain("one"), chain(name)
        (expected,) = (rank.losses for rank in alone.ranks)
        assert expected[-1] < 0.9 * expected[0]
        for rank in here.ranks:
            assert bool(rank.losses) == (rank.place[1] == 1)
            if rank.losses:
                assert_near(rank.losses, expected, "loss of each step")
        for stage, rows in here.metrics.items():
            more = ("val_accuracy",) if stage == "finetune" else ()
            assert_same_metrics(rows, alone.metrics[stage], COLUMNS + more)

    def test_weights(self, chain, name):
        (whole,) = (rank.last for rank in chain("one").ranks)
        worst = 0.0
        for rank in chain(name).ranks:
            for key, weight in rank.last.items():
                part = shard(whole[key], key, rank.place[0], tensor=2)
                worst = max(worst, np.abs(weight - part).max() / np.abs(part).max())
        print(f"weights: {worst:.1e}")
        assert worst <= TOLERANCE

    def test_predictions(self, chain, ranks, name, tmp_path):
        """Also one process predicts the same with the checkpoint of eight."""
        exact, expected = probabilities(chain("one").predictions)
        assert [int(row[0]) for row in exact] == list(range(300))
        assert np.ptp(expected, axis=0).max() > 0.3  # it tells images apart
        (alone,) = ranks.run(
            jobs.predict, jobs.layout(), tmp_path, chain(name).classifier, world_size=1
        )
        for path in (chain(name).predictions, Path(alone)):
            rows, here = probabilities(path)
            print(f"probabilities: {np.abs(here - expected).max():.1e}")
            assert rows == exact
            np.testing.assert_allclose(here, expected, atol=TOLERANCE)


def test_the_script_starts_eight_processes(chain, tmp_path):
    """Its options give the layout that the other tests give the ranks."""
    layout = ("--devices", 8, "--tensor-parallel", 2, "--pipeline-parallel", 2)
    data = ("--dataset", "digits", "--data-dir", tmp_path / "no-data", "--precision", "32")
    sizes = ("--global-batch-size", jobs.GLOBAL_BATCH, "--micro-batch-size", 8, "--lr", "0.001")
    steps = ("--max-steps", STEPS, "--val-interval", STEPS // 2, "--save-interval", STEPS)
    place = ("--accelerator", "cpu", "--output-dir", tmp_path)
    done = run_script("model_pretrain.py", *layout, *data, *sizes, *steps, *place)
    done.output()
    assert "8 processes: tensor 2 x pipeline 2 x data 2" in done.err
    rows = read_csv(tmp_path / "pretrain" / "metrics.csv")
    assert_same_metrics(rows, chain("one").metrics["pretrain"])


class TestLanguageModel:
    @pytest.fixture(scope="class")
    def trained(self, ranks, tmp_path_factory):
        @cache
        def train(case, resume=None):
            folder = tmp_path_factory.mktemp("gpt")
            found = ranks.run(
                gpt_example.train, case, folder, resume, world_size=case.layout.world_size
            )
            return found, read_csv(folder / "pretrain" / "metrics.csv")

        return train

    @pytest.mark.parametrize("name", GPT)
    def test_losses_and_gradients(self, trained, name):
        (alone,), expected = trained(Case())
        assert alone.losses[-1] < 0.8 * alone.losses[0]
        found, rows = trained(GPT[name])
        assert [len(rank.losses) for rank in found] == [0] * 4 + [gpt_example.STEPS] * 4
        for rank in found[4:]:
            assert_near(rank.losses, alone.losses, "loss of each step")
        assert_same_metrics(rows, expected)

    def test_a_resumed_run_is_bit_identical(self, trained):
        whole, _ = trained(BOTH)
        resumed, _ = trained(BOTH, whole[0].checkpoint)
        for before, after in zip(whole, resumed, strict=True):
            assert after.losses == before.losses[gpt_example.STEPS // 2 :]
            for name, weight in before.weights.items():
                np.testing.assert_array_equal(after.weights[name], weight, err_msg=name)

    def test_a_checkpoint_has_all_updated_weights(self, trained, ranks):
        """No validation gathers them before it is saved."""
        (one,), (eight,) = (
            ranks.run(gpt_example.weights_in, found[0].checkpoint, world_size=1)
            for found, _ in (trained(Case()), trained(BOTH))
        )
        worst = max(np.abs(eight[name] - one[name]).max() for name in one)
        print(f"weights in the checkpoint: {worst:.1e}")
        assert worst <= 5e-4  # one step changes weights by up to the rate, 5e-3

    @pytest.mark.parametrize("case", [Case(distributed_optimizer=True), GPT["distributed"]])
    def test_it_resumes_under_other_layouts(self, trained, case):
        """Also with other buckets, which the checkpoint is not to depend on."""
        (alone,), _ = trained(Case())
        checkpoint = trained(BOTH)[0][0].checkpoint
        for rank in trained(case, checkpoint)[0]:
            if rank.losses:
                assert_near(rank.losses, alone.losses[gpt_example.STEPS // 2 :], "loss, resumed")
