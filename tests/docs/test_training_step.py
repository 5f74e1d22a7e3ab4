"""The picture of a training step in docs/course/10_nemo.md shows the calls of a real one."""

import runpy
from typing import Any

from megakit.testing import Ranks
from tests.scripts import REPOSITORY

SCRIPT = runpy.run_path(str(REPOSITORY / "docs" / "images" / "make_step.py"))
#: Depth, function, and whether it is called for each micro batch.
Row = tuple[int, str, bool]
ROWS: list[Row] = [(call.depth, call.function, call.repeated) for call in SCRIPT["CALLS"]]
MICRO_BATCHES = 2


def observe(functions: list[str]) -> tuple[list[tuple[int, str]], list[object]]:
    """Trains for one step on two tensor-parallel ranks: one process goes a shorter way.

    Returns:
        The calls of these functions in order, with their depth; and what `set_input_tensor` gets.
    """
    import inspect
    import sys
    from pkgutil import resolve_name

    from nemo import lightning as nl

    from experiments.training import MICRO_BATCH, digits
    from megakit.nemo.strategy import ExactStrategy
    from megakit.training import train
    from model_components import BionemoLightningModule, PretrainConfig

    names = {inspect.unwrap(resolve_name(name)).__code__: name for name in functions}
    calls: list[tuple[int, str]] = []
    inputs: list[object] = []
    depth = 0

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal depth
        if frame.f_code in names and event in ("call", "return"):
            if event == "call":
                calls.append((depth, names[frame.f_code]))
                if frame.f_code.co_name == "set_input_tensor":
                    inputs.append(frame.f_locals["input_tensor"])
            depth += 1 if event == "call" else -1

    data = digits(global_batch_size=MICRO_BATCHES * MICRO_BATCH)
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ExactStrategy(tensor_model_parallel_size=2, ddp="megatron"),
        plugins=nl.MegatronMixedPrecision(precision="32"),
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
    )
    sys.setprofile(profile)
    try:
        train(model=BionemoLightningModule(PretrainConfig()), data=data, trainer=trainer)
    finally:
        sys.setprofile(None)
    return calls, inputs


def expected(rows: list[Row]) -> list[tuple[int, str]]:
    """The calls of a step with two micro batches."""
    first = next(place for place, row in enumerate(rows) if row[2])
    end = max(place for place, row in enumerate(rows) if row[2]) + 1
    whole = [*rows[:first], *rows[first:end] * MICRO_BATCHES, *rows[end:]]
    return [(depth, function) for depth, function, _ in whole]


def test_a_step(ranks: Ranks) -> None:
    for calls, inputs in ranks.run(observe, [function for _, function, _ in ROWS], world_size=2):
        assert calls == expected(ROWS)
        assert inputs == [[None]] * MICRO_BATCHES
