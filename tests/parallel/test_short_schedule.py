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


def fit(layout: Any, folder: Path, change: str, is_short: bool) -> tuple[Any, list[str]]:
    """Pretrains for three steps; returns what a rank saw, and the functions that ran."""
    import torch
    from megatron.core.pipeline_parallel import schedules

    from megakit.training import micro_batches, optimizer
    from model_components import MSELossReduction

    ran: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            if not options.get("forward_only"):
                ran.append(name)
            return function(*args, **options)

        return note

    def with_count(self: Any, batch: Any, output: Any) -> Any:
        loss, report = reported(self, batch, output)
        return loss * len(batch["idx"]), torch.tensor(len(batch["idx"])), report

    reported, module = MSELossReduction.forward, optimizer.LeanOptimizerModule
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(schedules, "backward_step", noted("long", schedules.backward_step))
        if change == COUNTS:
            replace(MSELossReduction, "forward", with_count)
        if change == "own gradients":
            replace(module, "finalize_model_grads", noted("own", module.finalize_model_grads))
        if not is_short:
            replace(micro_batches, "short_schedule", mock.Mock(return_value=None))
        ddp = ("overlap_grad_reduce",) if change == "overlap" else ()
        return jobs.pretrain(layout, folder, 3, ddp), sorted(set(ran))


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
    assert [ran for _, ran in (*short, *long)] == [[]] * size + [["long"]] * size
    for (one, _), (other, _) in zip(short, long, strict=True):
        assert one.losses == other.losses
        for name, weight in one.last.items():
            assert not np.array_equal(weight, one.first[name])
            assert np.array_equal(weight, other.last[name])
    tables = {(tmp_path / name / "pretrain/metrics.csv").read_bytes() for name in ("short", "long")}
    assert len(tables) == 1


@pytest.mark.parametrize(
    ("change", "layout", "ran"),
    [
        ("own gradients", {}, ["long", "own"]),
        ("overlap", {"world_size": 2}, ["long"]),
        ("tensor parallelism", {"world_size": 2, "tensor": 2}, ["long"]),
    ],
)
def test_where_more_is_due(
    ranks: Ranks, tmp_path: Path, change: str, layout: dict[str, int], ran: list[str]
) -> None:
    """What `finalize_model_grads` of one's own does, and what ranks share."""
    job = jobs.layout(**layout)
    found = ranks.run(fit, job, tmp_path, change, True, world_size=layout.get("world_size", 1))
    assert {tuple(functions) for _, functions in found} == {tuple(ran)}
