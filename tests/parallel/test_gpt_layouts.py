"""The language model of examples/gpt under every layout: losses, resumption and samples."""

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parallel import gpt_example
from tests.parallel.gpt_example import Case
from tests.scripts import read_csv

TOLERANCE = 1e-5  # relative, of a loss in float32: sums in another order differ in the last bits
LAYOUTS = {
    "tp2": Case(tensor=2),
    "pp2": Case(pipeline=2),
    "pp4": Case(pipeline=4),
    "tp2-pp2": Case(tensor=2, pipeline=2),
    "dp2": Case(data=2),
    "dp2-distributed": Case(data=2, distributed_optimizer=True),
    "tp2-sequence": Case(tensor=2, sequence_parallel=True),
}
SHORT = ("pp2", "tp2-sequence")
#: The distributed optimizer identifies the run, so other runs cannot resume its checkpoints.
NOT_DISTRIBUTED = [name for name, case in LAYOUTS.items() if not case.distributed_optimizer]
CASES = [
    pytest.param(
        replace(case, recompute=recompute),
        id=f"{name}-recompute" if recompute else name,
        marks=[] if name in SHORT and not recompute else pytest.mark.long,
    )
    for name, case in LAYOUTS.items()
    for recompute in (False, True)
]


@pytest.fixture(scope="session")
def trained(ranks, tmp_path_factory):
    """Trains under a layout, once for all tests that ask for the same."""

    @cache
    def train(case, **how):
        folder = tmp_path_factory.mktemp("gpt")
        return ranks.run(
            gpt_example.train, case, folder, *how.values(), world_size=case.layout.world_size
        )

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


def test_without_the_sum_of_tied_gradients(trained):
    """The embedding and the output layer, on two stages, would no longer have equal weights."""
    (expected,) = losses_of(trained(Case()))
    (found,) = losses_of(trained(Case(pipeline=2), resume=None, untied=True))
    np.testing.assert_allclose(found[0], expected[0], rtol=TOLERANCE)
    assert abs(found[-1] / expected[-1] - 1) > 100 * TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_bit_identical(trained, case):
    whole = trained(case)
    resumed = trained(case, resume=whole[0].checkpoint)
    for before, after in zip(whole, resumed, strict=True):
        assert after.losses == before.losses[gpt_example.STEPS // 2 :]
        for name, weight in before.weights.items():
            np.testing.assert_array_equal(after.weights[name], weight, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("case", [Case(), Case(tensor=2), Case(pipeline=2), Case(data=2)])
def test_a_resumed_run_with_dropout_is_bit_identical(trained, case):
    test_a_resumed_run_is_bit_identical(trained, replace(case, dropout=0.1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (before, after)
        for (i, before), (j, after) in itertools.permutations(enumerate(NOT_DISTRIBUTED), 2)
        if (j - i) % len(NOT_DISTRIBUTED) in (1, 4)  # each layout twice before and twice after
    ],
)
def test_any_layout_resumes_any(trained, before, after):
    (expected,) = losses_of(trained(Case()))
    checkpoint = trained(LAYOUTS[before])[0].checkpoint
    for losses in losses_of(trained(LAYOUTS[after], resume=checkpoint)):
        np.testing.assert_allclose(losses, expected[gpt_example.STEPS // 2 :], rtol=TOLERANCE)


def test_the_validation_loss_is_the_mean_over_all_tokens(trained, megatron):
    """The validation text has 14 blocks of 16 bytes and a rest, in global batches of 8."""
    from examples.gpt import gpt_components
    from examples.gpt.text_files import read_splits
    from megakit.models import load_for_inference

    (rank,) = trained(Case())
    checkpoint = Path(rank.checkpoint)
    model = load_for_inference(checkpoint).double()
    _, text = read_splits(gpt_example.TEXT)
    blocks = gpt_components.TextBlocks(text, gpt_example.SIZES["block_size"])
    assert len(text) % len(blocks)
    losses: list[float] = []
    for block in (blocks[index] for index in range(len(blocks))):
        logits = model(block["tokens"][None])[0]
        each = torch.nn.functional.cross_entropy(logits, block["labels"], reduction="none")
        losses += each[block["loss_mask"] > 0].tolist()
    assert len(losses) == len(text) - 1
    row = next(row for row in read_csv(checkpoint / "metrics.csv") if row["val_loss"])
    assert float(row["val_loss"]) == pytest.approx(sum(losses) / len(losses), abs=1e-6)


@pytest.mark.parametrize(
    "case", [Case(), Case(tensor=2), Case(pipeline=2), Case(tensor=2, pipeline=2)], ids=str
)
def test_samples_are_those_of_the_plain_model(trained, ranks, megatron, tmp_path, case):
    from examples.gpt import gpt_components as gpt_components  # the checkpoint names its config
    from examples.gpt.sampling import NextLogits, generate
    from megakit.models import load_for_inference

    (rank,) = trained(Case())
    prompt = torch.tensor([list(b"The ")])
    model = load_for_inference(rank.checkpoint)
    tokens = generate(NextLogits(model, 1), prompt, 50, temperature=0.7, top_k=50, seed=42)
    text = bytes(tokens[0].tolist())
    assert len(set(text)) > 10
    paths = ranks.run(
        gpt_example.sample, case, tmp_path, rank.checkpoint, world_size=case.layout.world_size
    )
    assert {Path(path).read_bytes() for path in paths} == {text}


def test_samples_in_bfloat16_under_pipelines(trained, ranks, tmp_path):
    (rank,) = trained(Case())
    texts = set()
    for case in (Case(), Case(pipeline=2)):
        arguments = (case, tmp_path, rank.checkpoint, "bf16-mixed")
        paths = ranks.run(gpt_example.sample, *arguments, world_size=case.layout.world_size)
        texts.add(Path(paths[0]).read_bytes())
    assert len(texts) == 1
