"""Measures the seconds of a training by activity, over all starts of its run."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from megakit.job.finish import Trained

T = TypeVar("T")


class Clock:
    """Adds up the seconds of activities: `training`, the `data` in it, `validation`, `checkpoints`.

    A checkpoint keeps `state_dict()`, so that a resumed run knows the time of its earlier starts.

    Args:
        began: When the script began, by `time.perf_counter()`.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        activities = ("data", "training", "validation", "checkpoints")
        self.earlier, self.now = dict.fromkeys(activities, 0.0), dict.fromkeys(activities, 0.0)

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Adds the time of a block to an activity."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.now[activity] += time.perf_counter() - began

    def measure_each(self, items: Iterable[T], activity: str = "data") -> Iterator[T]:
        """Adds the time of waiting for each item to an activity."""
        iterator = iter(items)
        while True:
            with self.measure(activity):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def state_dict(self) -> dict[str, float]:
        """Returns the seconds of all starts, for a checkpoint."""
        return {name: self.earlier[name] + self.now[name] for name in self.now}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the seconds of earlier starts from a checkpoint."""
        self.earlier = dict(state)

    def trained(self, steps: int, best: str, last: str) -> Trained:
        """Returns what the training has done, for `megakit.job.finish.finish_training`."""
        total, now, all_starts = time.perf_counter() - self.began, self.now, self.state_dict()
        spent = now["training"] + now["validation"] + now["checkpoints"]
        return Trained(
            steps=steps,
            seconds=sum(all_starts.values()) - all_starts["data"],
            stepping_seconds=all_starts["training"],
            times={"start_up": total - spent, **now, "training": now["training"] - now["data"]},
            best=best,
            last=last,
        )
