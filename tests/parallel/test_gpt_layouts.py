"""The language model of examples/gpt under every layout: losses, resumption and samples."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.parallel import gpt_example
from tests.parallel.gpt_example import Case

LONG = pytestmark = pytest.mark.long
TOLERANCE = 1e-5  # relative, of a loss in float32: sums in another order differ in the last bits
LAYOUTS = {
    "pp2": Case(pipeline=2),
    "dp2-distributed": Case(data=2, distributed_optimizer=True, overlap=True),
    "tp2-sequence": Case(tensor=2, sequence_parallel=True),
    "pp4": Case(pipeline=4),
    "tp2-pp2-recompute": Case(tensor=2, pipeline=2, sequence_parallel=True, recompute=True),
    "pp2-dp2-distributed": Case(pipeline=2, data=2, distributed_optimizer=True),
}
SHORT = ("pp2", "dp2-distributed", "tp2-sequence")
CASES = [
    pytest.param(case, id=name, marks=[] if name in SHORT else LONG)
    for name, case in LAYOUTS.items()
]
DROPOUT = Case(tensor=2, pipeline=2, sequence_parallel=True, recompute=True, dropout=0.1)
EFFICIENT = "distrib_optim_fully_reshardable_mem_efficient"
BFLOAT16 = Case(data=2, distributed_optimizer=True, precision="bf16-mixed")


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


@pytest.mark.parametrize("case", CASES)
def test_losses(trained, case):
    (expected,) = losses_of(trained(Case()))
    assert len(expected) == gpt_example.STEPS
    assert expected[-1] < 0.8 * expected[0]
    found = losses_of(trained(case))
    assert found
    for losses in found:
        np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [*CASES, pytest.param(DROPOUT, marks=LONG), pytest.param(BFLOAT16, marks=LONG)],
    ids=lambda case: "" if case in LAYOUTS.values() else str(case),
)
def test_a_resumed_run_is_bit_identical(trained, case):
    whole = trained(case)
    resumed = trained(case, whole[0].checkpoint)
    for before, after in zip(whole, resumed, strict=True):
        assert after.losses == before.losses[gpt_example.STEPS // 2 :]
        for name, weight in before.weights.items():
            np.testing.assert_array_equal(after.weights[name], weight, err_msg=name)


@LONG
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


@LONG
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
        pytest.param("pp4", "tp2-pp2-recompute", marks=LONG),
        pytest.param("dp2-distributed", "pp2-dp2-distributed", marks=LONG),
    ],
)
def test_any_layout_resumes_any(trained, before, after):
    (expected,) = losses_of(trained(Case()))
    checkpoint = trained(LAYOUTS[before])[0].checkpoint
    for losses in losses_of(trained(LAYOUTS[after], checkpoint)):
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
