"""A stop signal that some ranks receive: all ranks stop after the same step.

The functions below run in the pool's processes.
"""

import os
import signal
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megakit.testing import distributed_model_parallel_state


def take_steps(received: dict[int, int], step_seconds: float) -> tuple[Any, ...]:
    """Steps of this duration on rank 0, and of half of it on rank 1, until the ranks stop.

    Some ranks receive a signal before step 31. Returns the signal, the step and the save of the
    stop, and the steps before which the ranks have agreed.
    """
    import torch

    from megakit.errors import Stopped
    from megakit.training import callbacks

    rank, agreed = int(os.environ["RANK"]), []
    saved: list[tuple[int, bool]] = []
    writer: Any = SimpleNamespace(
        save=lambda trainer, store_values: saved.append((trainer.global_step, store_values))
    )
    trainer: Any = SimpleNamespace(
        world_size=2, global_step=0, strategy=SimpleNamespace(root_device=torch.device("cpu"))
    )
    clock = SimpleNamespace(now=1000.0 * rank)  # clocks of two machines differ
    all_reduce = torch.distributed.all_reduce

    def counted(*arguments: Any) -> Any:
        agreed.append(trainer.global_step)
        return all_reduce(*arguments)

    with (
        distributed_model_parallel_state(timeout=20),
        mock.patch.object(callbacks, "time", SimpleNamespace(monotonic=lambda: clock.now)),
        mock.patch.object(torch.distributed, "all_reduce", counted),
    ):
        stop = callbacks.StopOnSignal(writer)
        stop.setup(trainer, None, "fit")  # type: ignore[arg-type]
        try:
            for trainer.global_step in range(100):
                if trainer.global_step == 30 and rank in received:
                    signal.raise_signal(received[rank])
                stop.on_train_batch_start(trainer)
                clock.now += step_seconds / (1 + rank)
        except Stopped as stopped:
            return stopped.signal, stopped.step, saved, agreed
        finally:
            stop.teardown(trainer, None, "fit")  # type: ignore[arg-type]
    return (None,)


@pytest.mark.parametrize(
    ("received", "step_seconds", "most_steps"),
    [
        ({0: signal.SIGTERM}, 3.0, 1),
        ({1: signal.SIGTERM}, 0.4, 2),
        ({0: signal.SIGINT, 1: signal.SIGTERM}, 0.001, 8),
    ],
    ids=["slow", "2 steps a second", "quick"],
)
def test_all_ranks_stop_after_the_same_step(
    ranks: Any, received: dict[int, int], step_seconds: float, most_steps: int
) -> None:
    """Soon after the signal, and without communication in every step where steps are short."""
    told, other = ranks.run(take_steps, received, step_seconds, world_size=2)
    assert told == other
    number, step, saved, agreed = told
    assert number == signal.SIGTERM
    assert 30 <= step <= 30 + most_steps
    assert saved == [(step, False)]
    first, *others = [later - earlier for earlier, later in pairwise(agreed)]
    assert first == 1  # nobody knows yet how long a step is
    assert {*others} == {most_steps}
