"""The short way through a training step: the bits of Megatron's schedule, and not where it errs."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megakit.testing import Ranks
from tests.parallel import jobs


def fit(
    layout: Any, folder: Path, change: str, is_short: bool = True
) -> tuple[Any, bool, list[Any]]:
    """Pretrains for three steps.

    Returns:
        What a rank saw, whether Megatron's backward pass ran, and what `set_input_tensor` got.
    """
    import torch
    from megatron.core import timers
    from megatron.core.pipeline_parallel import schedules
    from nemo.lightning.pytorch.strategies import megatron_strategy

    from megakit.nemo import micro_batches
    from model_components import ExampleModelTrunk, MSELossReduction

    inputs = list[Any]()

    def with_count(self: Any, batch: Any, output: Any) -> Any:
        loss, report = reported(self, batch, output)
        return loss * len(batch["idx"]), torch.tensor(len(batch["idx"])), report

    reported = MSELossReduction.forward
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> Any:
            return stack.enter_context(mock.patch.object(owner, name, value))

        backward = replace(schedules, "backward_step", mock.Mock(wraps=schedules.backward_step))
        replace(ExampleModelTrunk, "set_input_tensor", lambda _, given: inputs.append(given))
        if change == "counts":
            replace(MSELossReduction, "forward", with_count)
        if change == "timers":
            replace(torch.cuda, "synchronize", lambda: None)
            replace(megatron_strategy, "Timers", lambda _, how: timers.Timers(1, how))
        if not is_short:
            replace(micro_batches, "shortened", lambda schedule, model: schedule)
        ddp = ("overlap_grad_reduce",) * (change == "overlap")
        return jobs.pretrain(layout, folder, 3, ddp), backward.called, inputs


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        ("one micro batch", {"micro_batches": 1}),
        ("four micro batches", {"micro_batches": 4}),
        ("replicas", {"world_size": 2}),
        ("counts", {}),
    ],
)
def test_the_same_bits(ranks: Ranks, tmp_path: Path, change: str, layout: dict[str, int]) -> None:
    size = layout.get("world_size", 1)
    short, long = (
        ranks.run(
            fit, jobs.layout(**layout), tmp_path / name, change, name == "short", world_size=size
        )
        for name in ("short", "long")
    )
    for (one, is_long, inputs), (other, *expected) in zip(short, long, strict=True):
        assert not is_long
        assert expected == [True, inputs]
        assert one.losses == other.losses
        for name, weight in one.last.items():
            assert not np.array_equal(weight, one.first[name])
            assert np.array_equal(weight, other.last[name])
    tables = {(tmp_path / name / "pretrain/metrics.csv").read_bytes() for name in ("short", "long")}
    assert len(tables) == 1


@pytest.mark.parametrize("change", ["timers", "overlap", "tensor parallelism"])
def test_where_more_is_due(ranks: Ranks, tmp_path: Path, change: str) -> None:
    """What is timed, what ranks exchange in the backward pass, or have to sum after it."""
    layout = jobs.layout(2, tensor=2 if change == "tensor parallelism" else 1)
    assert all(long for _, long, _ in ranks.run(fit, layout, tmp_path, change, world_size=2))
