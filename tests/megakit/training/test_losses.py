"""The mean over ranks, and outputs that travel as losses."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


def test_mean_of_one_rank_is_that_of_its_micro_batches() -> None:
    from megakit.training import mean_over_data_parallel_ranks

    averages = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(6.0)]
    mean = mean_over_data_parallel_ranks(averages)
    assert mean.item() == 3.0
    assert mean.shape == ()
    assert [average.item() for average in averages] == [1, 2, 6]


def test_mean_is_taken_in_float32() -> None:
    """In bfloat16 the sum of 256 and 1 is 256."""
    from megakit.training import mean_over_data_parallel_ranks

    averages = [torch.tensor(value, dtype=torch.bfloat16) for value in (256.0, 1.0)]
    mean = mean_over_data_parallel_ranks(averages)
    assert mean.dtype == torch.float32
    assert mean.item() == 128.5


def test_mean_is_that_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of two ranks, the other with a mean of 7. (Real ones: the tests of layouts.)"""
    from megatron.core import parallel_state

    from megakit.training import mean_over_data_parallel_ranks

    groups = []

    def add_the_others(tensor: torch.Tensor, group: Any = None) -> None:
        groups.append(group)
        tensor += 7

    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", add_the_others)
    assert mean_over_data_parallel_ranks([torch.tensor(1.0), torch.tensor(5.0)]).item() == 5.0
    assert groups == [parallel_state.get_data_parallel_group()]


OUTPUTS = {
    "a tensor": (lambda t: t, lambda out: out),
    "a dict": (lambda t: {"z": t, "idx": t[:, 0]}, lambda out: out["z"]),
    "a tuple": (lambda t: (t, t + 1), lambda out: out[0]),
    "nested": (lambda t: [{"x": (t,)}], lambda out: out[0]["x"][0]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_any_kind_come_back_as_one(kind: str) -> None:
    from megakit.training import PassthroughLossReduction

    wrap, unwrap = OUTPUTS[kind]
    passthrough = PassthroughLossReduction()
    parts = [torch.arange(6.0).reshape(3, 2), torch.arange(4.0).reshape(2, 2)]
    reported = []
    for part in parts:
        loss, report = passthrough.forward({"data": None}, wrap(part))
        assert loss.item() == 0
        assert loss.shape == ()
        reported.append(report)
    whole = passthrough.reduce(reported)
    assert type(whole) is type(wrap(parts[0]))
    assert torch.equal(unwrap(whole), torch.cat(parts))


def test_every_entry_of_a_dict_is_concatenated() -> None:
    from megakit.training import PassthroughLossReduction

    outputs = [{"z": torch.ones(2, 3), "idx": torch.tensor([first, 1])} for first in (0, 2)]
    whole = PassthroughLossReduction().reduce(outputs)
    assert whole["idx"].tolist() == [0, 1, 2, 1]
    assert whole["z"].shape == (4, 3)


def test_the_mixin_names_the_loss_for_predictions() -> None:
    from megakit.training import LightningPassthroughPredictionMixin, PassthroughLossReduction

    loss = LightningPassthroughPredictionMixin().predict_loss_reduction()
    assert isinstance(loss, PassthroughLossReduction)
