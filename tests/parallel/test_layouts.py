"""One model under every layout: the same weights, samples, losses and predictions as one process.

Real processes, NeMo's MegatronStrategy and our trainer, in float32.
"""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megakit.job.layout import Layout
from tests.parallel import jobs
from tests.scripts import read_csv

LAYOUTS = {
    "tp2": {"world_size": 2, "tensor": 2},
    "pp2": {"world_size": 2, "pipeline": 2},
    "dp2": {"world_size": 2},
    "tp2-pp2": {"world_size": 4, "tensor": 2, "pipeline": 2},
    "tp2-dp2": {"world_size": 4, "tensor": 2},
    "pp2-dp2": {"world_size": 4, "pipeline": 2},
    "tp2-pp2-dp2": {"world_size": 8, "tensor": 2, "pipeline": 2},
}
TOLERANCE = 1e-5  # relative, of a loss in float32: sums in another order differ in the last bits
STEPS = 20
#: What tensor parallelism cuts, and along which dimension.
CUT = {r"linear[13]\.(weight|bias)": 0, r"linear[24]\.weight": 1}
#: What the first of two stages holds; the second has the rest.
FIRST_STAGE = r"linear[12]\..*"
SEQUENCE = "sequence_parallel"
#: With data parallelism, the distributed optimizer has something to shard; all but one are long.
LONG = ("tp2-dp2", "pp2-dp2", "tp2-pp2-dp2")
#: Those of the chain on Megatron-Core alone that are not long.
SHORT = ("tp2-pp2",)


def cases(names, packages=("", jobs.MEGATRON)):
    return pytest.mark.parametrize(
        ("name", "package"),
        [
            pytest.param(
                *(name, package),
                marks=pytest.mark.long if name in LONG or (package and name not in SHORT) else [],
                id=f"{name}-alone" if package else name,
            )
            for package in packages
            for name in names
        ],
    )


CASES, DISTRIBUTED = cases(LAYOUTS), cases(("dp2", *LONG))


class Training:
    """What all ranks of one training run saw, and what it left behind."""

    def __init__(self, ranks, folder, ddp=(), package="", **layout):
        self.layout = jobs.layout(**layout)
        self.runs = folder
        self.ranks = ranks.run(
            *(jobs.pretrain, self.layout, folder, STEPS, ddp, package),
            world_size=self.layout.world_size,
        )
        self.metrics = read_csv(folder / "pretrain" / "metrics.csv")

    def losses(self):
        """The losses of each rank on the last stage."""
        return [np.array(rank.losses) for rank in self.ranks if rank.losses]

    def samples(self):
        """Of each tensor-parallel rank and stage, the samples of every global batch in order."""
        for place in sorted({rank.place[:2] for rank in self.ranks}):
            peers = [rank for rank in self.ranks if rank.place[:2] == place]
            peers.sort(key=lambda rank: rank.place[2])
            yield [
                # (M, ranks, micro, 2): a slice of the global batch is one micro batch of each rank
                np.stack(parts, axis=1).reshape(-1, 2)
                for parts in zip(*(peer.samples for peer in peers), strict=True)
            ]


@pytest.fixture(scope="session")
def training(ranks, tmp_path_factory):
    """Trains under a layout, once for all tests that ask for the same."""

    @cache
    def train(**how):
        return Training(ranks, tmp_path_factory.mktemp("layout"), **how)

    return train


@pytest.fixture
def alone(training):
    """One process, no accumulation: what all others are compared with."""
    return training(micro_batches=1)


def shard(whole, name, rank, tensor):
    for pattern, dimension in CUT.items():
        if re.fullmatch(pattern, name):
            return np.array_split(whole, tensor, axis=dimension)[rank]
    return whole


def assert_same_metrics(rows, expected):
    """Compares two tables of metrics.csv, in which the same values are left out."""
    for column in ("step", "train_loss", "val_loss", "val_accuracy", "lr", "grad_norm"):
        here, there = ([float(row.get(column) or 0) for row in t] for t in (rows, expected))
        tolerance = 1e-4 if column == "grad_norm" else TOLERANCE
        np.testing.assert_allclose(here, there, rtol=tolerance, err_msg=column)


class TestEveryLayout:
    @CASES
    def test_weights_begin_the_same(self, alone, training, name, package):
        (whole,) = (rank.first for rank in alone.ranks)
        layout = LAYOUTS[name]
        run = training(**layout, package=package)
        first_stage = {key for key in whole if re.fullmatch(FIRST_STAGE, key)}
        assert first_stage
        for rank in run.ranks:
            expected = whole.keys()
            if "pipeline" in layout:
                expected = whole.keys() - first_stage if rank.place[1] else first_stage
            assert rank.first.keys() == expected
            for key, weight in rank.first.items():
                part = shard(whole[key], key, rank.place[0], run.layout.tensor)
                np.testing.assert_array_equal(weight, part, err_msg=key)

    @CASES
    def test_a_global_batch_holds_the_same_samples(self, alone, training, name, package):
        ((expected),) = alone.samples()
        assert len(expected) == STEPS
        assert {len(batch) for batch in expected} == {jobs.GLOBAL_BATCH}
        for seen in training(**LAYOUTS[name], package=package).samples():
            for step, (batch, whole) in enumerate(zip(seen, expected, strict=True), start=1):
                np.testing.assert_array_equal(batch, whole, err_msg=f"step {step}")

    @CASES
    def test_losses(self, alone, training, name, package):
        (expected,) = alone.losses()
        assert len(expected) == STEPS
        assert expected[-1] < 0.8 * expected[0]  # it learns: equal losses of nothing prove nothing
        run = training(**LAYOUTS[name], package=package)
        assert {rank.optimizer for rank in run.ranks} == {"FP32Optimizer"}
        assert {rank.samples[0].shape[0] for rank in run.ranks} == {2}  # micro batches of a step
        assert run.losses()
        for losses in run.losses():
            np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)

    @DISTRIBUTED
    def test_the_distributed_optimizer_without_accumulation(self, alone, training, name, package):
        (expected,) = alone.losses()
        ddp = ("use_distributed_optimizer",)
        run = training(**LAYOUTS[name], micro_batches=1, ddp=ddp, package=package)
        assert {rank.optimizer for rank in run.ranks} == {"DistributedOptimizer"}
        assert {rank.samples[0].shape[0] for rank in run.ranks} == {1}
        for losses in run.losses():
            np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)

    @CASES
    def test_what_is_written_is_the_whole_job_s_and_written_once(
        self, alone, training, name, package
    ):
        run = training(**LAYOUTS[name], package=package)
        assert_same_metrics(run.metrics, alone.metrics)
        # Ranks that disagreed on a validation loss would disagree on the best checkpoint.
        assert {rank.best for rank in run.ranks} == {rank.best for rank in alone.ranks}
        logs = list((run.runs / "pretrain" / "tensorboard").glob("events.out.tfevents.*"))
        assert len(logs) == 1


def test_other_samples_are_noticed(alone, ranks, tmp_path):
    """Half of the global batch left out moves the losses by far more than the tolerance."""
    (expected,) = alone.losses()
    layout = Layout(1, 1, 1, 1, jobs.GLOBAL_BATCH // 2, jobs.GLOBAL_BATCH // 2)
    (other,) = ranks.run(jobs.pretrain, layout, tmp_path, 5, world_size=1)
    difference = np.abs(np.array(other.losses) / expected[:5] - 1)
    assert difference.max() > 100 * TOLERANCE


@pytest.mark.long
def test_sequence_parallelism_on_megatron_alone(alone, training):
    """Each tensor-parallel rank has half of the samples between the layers that are split."""
    run = training(world_size=2, tensor=2, package=jobs.MEGATRON, ddp=(SEQUENCE,))
    (expected,) = alone.losses()
    for losses in run.losses():
        np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    assert_same_metrics(run.metrics, alone.metrics)


def predicted(ranks, layout, folder, checkpoint, package=""):
    """Index, label and prediction of each row; and the probabilities."""
    how = (layout, folder, checkpoint, package)
    path = ranks.run(jobs.predict, *how, world_size=layout.world_size)[0]
    rows = read_csv(Path(path))
    exact = [(row["idx"], row["label"], row["prediction"]) for row in rows]
    return exact, np.array([[float(row[f"p{k}"]) for k in range(10)] for row in rows])


@pytest.fixture(scope="session")
def classifier(ranks, tmp_path_factory):
    """The checkpoint of a fine-tuning by one process."""
    folder = tmp_path_factory.mktemp("classifier")
    return ranks.run(jobs.finetune, jobs.layout(), folder, world_size=1)[0]


@cases([name for name in LAYOUTS if name not in LONG])
def test_one_checkpoint_predicts_the_same(ranks, tmp_path, classifier, name, package):
    exact, probabilities = predicted(ranks, jobs.layout(), tmp_path / "one", classifier)
    assert [int(row[0]) for row in exact] == list(range(300))
    assert np.ptp(probabilities, axis=0).max() > 0.5  # it tells images apart
    here, found = predicted(
        *(ranks, jobs.layout(**LAYOUTS[name]), tmp_path / "many", classifier, package)
    )
    assert [row[:2] for row in here] == [row[:2] for row in exact]
    np.testing.assert_allclose(found, probabilities, atol=1e-4)
