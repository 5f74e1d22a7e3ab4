"""Where the time of a run goes. (Rows of metrics.csv: test_chain, parallel/test_settings.)"""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("megatron")


def test_what_is_printed_after_an_error_starts_on_a_new_line() -> None:
    from megakit.training.progress import Reporter

    closed: list[bool] = []
    reporter = Reporter(None, "pretrain", None, None)  # type: ignore[arg-type]
    reporter.on_exception()  # before the first step
    reporter.progress = SimpleNamespace(close=lambda: closed.append(True))  # type: ignore[assignment]
    reporter.on_exception()
    assert closed == [True]


def test_times_of_a_start_that_finds_all_steps_done() -> None:
    from megakit.training.progress import Reporter

    writer: Any = SimpleNamespace(seconds=2.0)
    reporter = Reporter(None, "pretrain", writer, None)  # type: ignore[arg-type]
    reporter.load_state_dict({"seconds": 100.0, "validation_seconds": 10.0})
    times = reporter.times(7.0)
    assert times.pop("start_up") == 7.0
    assert set(times.values()) == {0.0}


def test_values_of_an_earlier_validation_are_dropped() -> None:
    """Lightning keeps them until they are logged again."""
    from megakit.training.progress import Reporter

    reporter = Reporter(None, "pretrain", None, None)  # type: ignore[arg-type]
    logged = {"val_rare": 7.0, "val_loss": 1.0, "train_loss": 2.0}
    trainer: Any = SimpleNamespace(callback_metrics=logged)
    module: Any = None
    reporter.on_validation_start(trainer, module)
    assert logged == {"train_loss": 2.0}
