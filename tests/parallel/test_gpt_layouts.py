"""The language model of examples/gpt under every layout: losses, resumption and samples."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.parallel import gpt_example
from tests.parallel.gpt_example import Case
from tests.scripts import read_csv

pytestmark = pytest.mark.long

TOLERANCE = 1e-5  # relative, of a loss in float32: sums in another order differ in the last bits
LAYOUTS = {
    "pp2": Case(pipeline=2),
    "dp2-distributed": Case(data=2, distributed_optimizer=True, overlap=True),
    "tp2-sequence": Case(tensor=2, sequence_parallel=True),
    "pp4": Case(pipeline=4),
    "tp2-pp2-recompute": Case(tensor=2, pipeline=2, sequence_parallel=True, recompute=True),
    "pp2-dp2-distributed": Case(pipeline=2, data=2, distributed_optimizer=True),
    "tp2-pp2-dp2-overlap": Case(2, 2, 2, sequence_parallel=True, overlap=True),
    "all": Case(2, 2, 2, sequence_parallel=True, distributed_optimizer=True, overlap=True),
}
DROPOUT = replace(LAYOUTS["tp2-pp2-recompute"], dropout=0.1)
BFLOAT16 = Case(data=2, distributed_optimizer=True, precision="bf16-mixed")
EFFICIENT = "distrib_optim_fully_reshardable_mem_efficient"


@pytest.fixture(scope="session")
def trained(ranks, tmp_path_factory):
    """Trains under a layout, once for all tests that ask for the same."""

    @cache
    def train(case, resume=None):
        folder = tmp_path_factory.mktemp("gpt")
        return ranks.run(gpt_example.train, case, folder, resume, world_size=case.layout.world_size)

    return train


def losses_of(found):
    """The losses of each rank on the last stage."""
    return [np.array(rank.losses) for rank in found if rank.losses]


def norms_of(found):
    """The norms of the gradients, of the steps that are logged."""
    rows = read_csv(Path(found[0].checkpoint).parents[1] / "pretrain" / "metrics.csv")
    return [float(row["grad_norm"]) for row in rows if row["grad_norm"]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses(trained, name):
    alone, found = trained(Case()), trained(LAYOUTS[name])
    (expected,) = losses_of(alone)
    assert len(expected) == gpt_example.STEPS
    assert expected[-1] < 0.8 * expected[0]
    assert losses_of(found)
    for losses in losses_of(found):
        np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    np.testing.assert_allclose(norms_of(found), norms_of(alone), rtol=TOLERANCE)


@pytest.mark.parametrize("case", [*LAYOUTS.values(), DROPOUT, BFLOAT16], ids=str)
def test_a_resumed_run_is_bit_identical(trained, case):
    whole = trained(case)
    resumed = trained(case, whole[0].checkpoint)
    for before, after in zip(whole, resumed, strict=True):
        assert after.losses == before.losses[gpt_example.STEPS // 2 :]
        for name, weight in before.weights.items():
            np.testing.assert_array_equal(after.weights[name], weight, err_msg=name)


@pytest.mark.parametrize(
    ("argument", "metadata"),
    [
        ("ckpt_optim_fully_reshardable", {"distrib_optim_sharding_type": "dp_reshardable"}),
        (EFFICIENT, {EFFICIENT: False}),
    ],
)
def test_a_reader_chooses_how_the_distributed_optimizer_is_saved(
    trained, ranks, argument, metadata
):
    case = replace(LAYOUTS["dp2-distributed"], strategy=((argument, False),))
    whole = trained(case)
    (found,) = ranks.run(gpt_example.metadata_of, whole[0].checkpoint, world_size=1)
    assert metadata.items() <= found.items()
    for before, after in zip(whole, trained(case, whole[0].checkpoint), strict=True):
        assert after.losses == before.losses[gpt_example.STEPS // 2 :]


def test_activations_are_computed_again_with_the_same_dropout(trained):
    found, kept, without = (
        losses_of(trained(case))[0].tolist()
        for case in (DROPOUT, replace(DROPOUT, recompute=False), replace(DROPOUT, dropout=0.0))
    )
    assert found == kept
    assert found != without


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2-sequence", "pp2"),
        ("pp4", "tp2-pp2-recompute"),
        ("all", "pp2-dp2-distributed"),
    ],
)
def test_any_layout_resumes_any(trained, before, after):
    """No validation gathers the weights of "all" before they are saved."""
    (expected,) = losses_of(trained(Case()))
    checkpoint = trained(LAYOUTS[before])[0].checkpoint
    found = losses_of(trained(LAYOUTS[after], checkpoint))
    assert found
    for losses in found:
        np.testing.assert_allclose(losses, expected[gpt_example.STEPS // 2 :], rtol=TOLERANCE)


def test_samples_are_those_of_the_plain_model(trained, ranks, tmp_path):
    (rank,) = trained(Case())
    (text,) = ranks.run(gpt_example.sample_of_the_plain_model, rank.checkpoint, world_size=1)
    assert len(set(text)) > 10
    for case in (Case(), Case(tensor=2, pipeline=2)):
        paths = ranks.run(
            gpt_example.sample, case, tmp_path, rank.checkpoint, world_size=case.layout.world_size
        )
        assert {Path(path).read_bytes() for path in paths} == {text}
