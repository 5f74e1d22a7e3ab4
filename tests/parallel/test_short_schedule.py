"""The short way through a training step: the bits of Megatron's schedule, and not where it errs."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megakit.testing import Ranks
from tests.parallel import jobs

COUNTS = "a loss that counts samples"


def fit(layout: Any, folder: Path, change: str, is_short: bool) -> tuple[Any, list[str], list[Any]]:
    """Pretrains for three steps.

    Returns:
        What a rank saw, the functions that ran, and what the model got by `set_input_tensor`.
    """
    import torch
    from megatron.core import timers
    from megatron.core.pipeline_parallel import schedules
    from nemo.lightning.pytorch.strategies import megatron_strategy

    from megakit.training import micro_batches
    from model_components import ExampleModelTrunk, MSELossReduction

    ran: list[str] = []
    inputs: list[Any] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            if not options.get("forward_only"):
                ran.append(name)
            return function(*args, **options)

        return note

    def with_count(self: Any, batch: Any, output: Any) -> Any:
        loss, report = reported(self, batch, output)
        return loss * len(batch["idx"]), torch.tensor(len(batch["idx"])), report

    def with_input(self: Any, tensor: Any) -> None:
        inputs.append(tensor)

    reported = MSELossReduction.forward
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(schedules, "backward_step", noted("long", schedules.backward_step))
        replace(ExampleModelTrunk, "set_input_tensor", with_input)
        if change == COUNTS:
            replace(MSELossReduction, "forward", with_count)
        if not is_short:
            replace(micro_batches, "shortened", lambda schedule, module: schedule)
        if change == "timers":
            replace(torch.cuda, "synchronize", lambda: None)
            replace(megatron_strategy, "Timers", lambda _, how: timers.Timers(1, how))
        ddp = ("overlap_grad_reduce",) if change == "overlap" else ()
        return jobs.pretrain(layout, folder, 3, ddp), sorted(set(ran)), inputs


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        ("one micro batch", {"micro_batches": 1}),
        ("four micro batches", {"micro_batches": 4}),
        ("replicas", {"world_size": 2}),
        (COUNTS, {}),
    ],
)
def test_the_same_bits(ranks: Ranks, tmp_path: Path, change: str, layout: dict[str, int]) -> None:
    size = layout.get("world_size", 1)
    short, long = (
        ranks.run(fit, jobs.layout(**layout), tmp_path / name, change, is_short, world_size=size)
        for name, is_short in (("short", True), ("long", False))
    )
    assert [ran for _, ran, _ in (*short, *long)] == [[]] * size + [["long"]] * size
    for (one, _, inputs), (other, _, expected) in zip(short, long, strict=True):
        assert inputs == expected
        assert one.losses == other.losses
        for name, weight in one.last.items():
            assert not np.array_equal(weight, one.first[name])
            assert np.array_equal(weight, other.last[name])
    tables = {(tmp_path / name / "pretrain/metrics.csv").read_bytes() for name in ("short", "long")}
    assert len(tables) == 1


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        ("timers", {"world_size": 2}),
        ("overlap", {"world_size": 2}),
        ("tensor parallelism", {"world_size": 2, "tensor": 2}),
    ],
)
def test_where_more_is_due(
    ranks: Ranks, tmp_path: Path, change: str, layout: dict[str, int]
) -> None:
    """What is timed, what ranks exchange in the backward pass, or have to sum after it."""
    for _, ran, _ in ranks.run(fit, jobs.layout(**layout), tmp_path, change, True, world_size=2):
        assert ran == ["long"]
