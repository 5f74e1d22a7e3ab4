"""The language model of examples/gpt under every layout: losses, resumption and samples."""

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel import gpt_example
from tests.parallel.gpt_example import Case

LONG = pytest.mark.long
TOLERANCE = 1e-5  # relative, of a loss in float32: sums in another order differ in the last bits
LAYOUTS = {
    "tp2": Case(tensor=2),
    "pp2": Case(pipeline=2),
    "pp4": Case(pipeline=4),
    "tp2-pp2": Case(tensor=2, pipeline=2),
    "dp2": Case(data=2),
    "dp2-distributed": Case(data=2, distributed_optimizer=True),
    "tp2-distributed": Case(tensor=2, distributed_optimizer=True),
    "tp2-sequence": Case(tensor=2, sequence_parallel=True),
    "tp2-pp2-recompute": Case(tensor=2, pipeline=2, sequence_parallel=True, recompute=True),
    "dp2-overlapped": Case(data=2, overlapped=True),
    "pp2-dp2-overlapped": Case(pipeline=2, data=2, distributed_optimizer=True, overlapped=True),
}
SHORT = ("pp2", "dp2-distributed", "tp2-sequence")
#: Layouts before and after a resumption; runs without the distributed optimizer cannot resume its
#: checkpoints.
RESUMED = [
    ("tp2", "dp2"),
    ("tp2-distributed", "dp2-distributed"),
    *(
        pytest.param(*pair, marks=LONG)
        for pair in (
            *itertools.pairwise(("tp2", "pp2", "dp2", "tp2-pp2-recompute", "pp4", "tp2-sequence")),
            ("tp2-sequence", "tp2"),
            *itertools.permutations(("dp2-distributed", "pp2-dp2-overlapped")),
        )
    ),
]
DROPOUT = {
    "one": Case(dropout=0.1),
    "tp2-sequence": Case(tensor=2, sequence_parallel=True, dropout=0.1),
    "pp2": Case(pipeline=2, recompute=True, dropout=0.1),
}
CASES = [
    pytest.param(case, id=name, marks=[] if name in SHORT else LONG)
    for name, case in LAYOUTS.items()
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


@LONG
@pytest.mark.parametrize(
    "case",
    [
        *DROPOUT.values(),
        Case(data=2, distributed_optimizer=True, precision="bf16-mixed"),
        Case(precision="bf16-mixed"),
    ],
    ids=str,
)
def test_a_resumed_run_with_dropout_or_in_bfloat16_is_bit_identical(trained, case):
    test_a_resumed_run_is_bit_identical(trained, case)


@LONG
def test_activations_are_computed_again_with_the_same_dropout(trained):
    found = trained(DROPOUT["pp2"])
    assert losses_of(found)[0].tolist() == (
        losses_of(trained(replace(DROPOUT["pp2"], recompute=False)))[0].tolist()
    )
    assert losses_of(found)[0].tolist() != losses_of(trained(Case(pipeline=2)))[0].tolist()


@LONG
def test_norms_with_sequence_parallelism(trained):
    """Each rank normalizes other tokens; Megatron sums the gradients of weights that are marked."""
    (expected,) = losses_of(trained(Case(rms_norm=True)))
    case = Case(tensor=2, sequence_parallel=True, rms_norm=True)
    for losses in losses_of(trained(case)):
        np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)


@pytest.mark.parametrize(("before", "after"), RESUMED)
def test_any_layout_resumes_any(trained, before, after):
    (expected,) = losses_of(trained(Case()))
    checkpoint = trained(LAYOUTS[before])[0].checkpoint
    for losses in losses_of(trained(LAYOUTS[after], resume=checkpoint)):
        np.testing.assert_allclose(losses, expected[gpt_example.STEPS // 2 :], rtol=TOLERANCE)


def test_every_weight_has_its_own_numbers(trained):
    (rank,) = trained(Case())
    drawn = [weight.ravel() for weight in rank.first.values() if len(np.unique(weight)) > 2]
    assert len(drawn) == 2 + 4 * 4  # two embeddings, and four a layer
    assert len({weight[:5].tobytes() for weight in drawn}) == len(drawn)


@pytest.mark.parametrize("case", [LAYOUTS["pp2"], pytest.param(LAYOUTS["tp2-pp2"], marks=LONG)])
def test_every_rank_counts_the_parameters_of_the_whole_model(trained, case):
    """Tied weights count once, although the last stage has a copy of the embedding."""
    (alone,) = trained(Case())
    number = sum(weight.size for weight in alone.weights.values())
    assert [rank.num_parameters for rank in (alone, *trained(case))] == (
        [number] * (1 + case.layout.world_size)
    )


def test_samples_are_those_of_the_plain_model(trained, ranks, tmp_path):
    (rank,) = trained(Case())
    (text,) = ranks.run(gpt_example.sample_of_the_plain_model, rank.checkpoint, world_size=1)
    assert len(set(text)) > 10
    for case in (Case(), Case(tensor=2, pipeline=2)):
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


def test_a_shard_without_weights(ranks):
    """A rank whose shard of the buffer is padding only has a state to save and to restore."""
    assert ranks.run(restore_small_shards, world_size=2) == [[], []]


def restore_small_shards():
    """Saves and restores the optimizer of four weights, which are all on rank 0; lists problems."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    from megakit.testing import distributed_model_parallel_state
    from megakit.training.optimizer import use_fused_adam

    use_fused_adam()
    with distributed_model_parallel_state():
        states: list[Any] = []
        for _ in range(2):
            model = DistributedDataParallel(
                TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
                DistributedDataParallelConfig(use_distributed_optimizer=True),
                torch.nn.Linear(4, 1, bias=False),
            )
            config = OptimizerConfig(lr=0.1, use_distributed_optimizer=True)
            optimizer = get_megatron_optimizer(config, [model])
            if states:
                optimizer.load_state_dict(states[0])
            else:
                for _ in range(3):
                    for weight in model.parameters():
                        weight.main_grad.fill_(1.0)
                    optimizer.step()
            states.append(optimizer.state_dict())
        saved, restored = (
            [group["step"] for group in state["optimizer"]["param_groups"]] for state in states
        )
        is_empty = not optimizer.chained_optimizers[0].optimizer.state
        problems = [] if is_empty == (torch.distributed.get_rank() == 1) else ["the shards"]
        problems += [] if saved == [3] * len(saved) else [f"saved {saved}"]
        return problems + ([] if restored == saved else [f"restored {restored}"])
