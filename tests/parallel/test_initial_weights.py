"""Initial weights of transformers and gradients of their norms do not depend on the layout."""

from dataclasses import replace

import numpy as np
import pytest

from megakit.testing import RankError, Ranks
from tests.parallel import gpt_jobs
from tests.parallel.gpt_jobs import Case, Found

LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "pp4": (1, 4), "tp2-pp2": (2, 2)}


def run(ranks: Ranks, case: Case, backward: bool = False) -> list[Found]:
    return ranks.run(gpt_jobs.build, case, backward, world_size=case.world_size)


def shard(whole: np.ndarray, dimension: int | None, case: Case, rank: int) -> np.ndarray:
    return whole if dimension is None else np.split(whole, case.tensor, dimension)[rank]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "positions", ["learned_absolute", pytest.param("rope", marks=pytest.mark.long)]
)
def test_initial_weights(ranks: Ranks, layout: str, tied: bool, positions: str) -> None:
    """Bit by bit, each rank's shards are parts of the weights of one process."""
    case = Case(*LAYOUTS[layout], tied=tied, positions=positions)
    (whole,) = run(ranks, replace(case, tensor=1, pipeline=1))
    names = set()
    for found in run(ranks, case):
        for name, weight in found.weights.items():
            # The last stage's copy of the embedding, which the loss reads.
            is_copy = tied and name == "output_layer.weight"
            expected = whole.weights["embedding.word_embeddings.weight" if is_copy else name].values
            part = shard(expected, weight.dimension, case, found.tensor_rank)
            np.testing.assert_array_equal(weight.values, part, err_msg=name)
            names.add("embedding.word_embeddings.weight" if is_copy else name)
    assert names == whole.weights.keys()


def test_every_weight_has_its_own_numbers(ranks: Ranks) -> None:
    (found,) = run(ranks, Case(tied=False))
    drawn = [w.values.ravel() for w in found.weights.values() if len(np.unique(w.values)) > 2]
    assert len(drawn) == 3 + 4 * 4  # two embeddings, the output layer, and four a layer
    assert len({weight[:5].tobytes() for weight in drawn}) == len(drawn)
    (other,) = run(ranks, Case(tied=False, fields={"seed": 4}))
    assert all(
        not np.array_equal(other.weights[name].values, weight.values)
        for name, weight in found.weights.items()
        if len(np.unique(weight.values)) > 2
    )


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(
    "positions", ["learned_absolute", pytest.param("rope", marks=pytest.mark.long)]
)
def test_gradients_under_sequence_parallelism(
    ranks: Ranks, normalization: str, positions: str
) -> None:
    """Each rank normalizes other tokens, and Megatron sums the gradients of marked weights."""
    fields = {"normalization": normalization, "qk_layernorm": True}
    case = Case(tensor=2, fields=fields | {"sequence_parallel": True}, positions=positions)
    (whole,) = run(ranks, Case(fields=fields, positions=positions), backward=True)
    for found in run(ranks, case, backward=True):
        assert found.loss == pytest.approx(whole.loss, rel=1e-6)
        assert found.weights.keys() == whole.weights.keys()
        for name, weight in found.weights.items():
            gradient = whole.weights[name].gradient
            assert gradient is not None
            assert weight.gradient is not None
            np.testing.assert_allclose(
                weight.gradient,
                shard(gradient, weight.dimension, case, found.tensor_rank),
                rtol=1e-4,
                atol=1e-6,
                err_msg=name,
            )


REMEDY = r"`with seeded\(config.seed, \"name\"\):`.*`transformer_block_spec`.*`SeededGPTModel`"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_megatrons_own_layers_are_refused_in_a_pipeline(ranks: Ranks, tied: bool) -> None:
    (found,) = run(ranks, Case(seeded=False, tied=tied))
    assert found.weights
    with pytest.raises(RankError, match=f"UserError: GPTModel: .*word_embeddings.*{REMEDY}"):
        run(ranks, Case(pipeline=2, seeded=False, tied=tied))


def test_all_stages_stop_if_one_stage_is_refused(ranks: Ranks) -> None:
    """Data-parallel ranks, too: 4 ranks of 2 stages."""
    one, *others = ranks.run(gpt_jobs.refusal_of_one_stage, world_size=4)
    assert one.startswith("Sequential: the initial weights of 0.weight, 0.bias depend")
    assert others == [one] * 3
