"""Where a training's time goes, and how many numbers it trains."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("megatron")


def test_the_clock_measures_data_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from megakit.training import progress

    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    clock = progress.DataClock()
    for action, seconds in (
        ("[_TrainingEpochLoop].train_dataloader_next", 2.0),
        ("[_TrainingEpochLoop].train_dataloader_next", 3.0),
        ("[_EvaluationLoop].val_next", 100.0),
        ("[LightningDataModule]Data.prepare_data", 7.0),
        ("[LightningDataModule]Data.setup", 10.0),
        ("[LightningDataModule]Data.state_dict", 1000.0),
        ("run_training_batch", 10000.0),
    ):
        with clock.profile(action):
            now.seconds += seconds
    assert (clock.fetch_seconds, clock.setup_seconds) == (5.0, 17.0)


def test_times_of_a_resumed_start_add_up_and_leave_out_the_starts_before() -> None:
    from megakit.training.progress import DataClock, Reporter

    writer: Any = SimpleNamespace(seconds=2.0)
    reporter = Reporter(None, "pretrain", writer, None, None)  # type: ignore[arg-type]
    reporter.load_state_dict({"seconds": 100.0, "validation_seconds": 10.0})
    reporter._at_start = {"steps": 88.0, "validation": 10.0, "checkpoints": 2.0}
    reporter.seconds, reporter.validation_seconds, writer.seconds = 109.0, 12.0, 3.0
    clock = DataClock()
    clock.setup_seconds, clock.fetch_seconds = 0.5, 0.25
    times = reporter.times(15.0, clock)
    assert times == {
        "start_up": 5.5,
        "data": 0.75,
        "training": 5.75,
        "validation": 2.0,
        "checkpoints": 1.0,
    }
    assert sum(times.values()) == 15.0
    assert reporter.stepping_seconds == 94.0


def test_parameters_of_the_job() -> None:
    import torch

    from megakit.training.progress import parameters_of_the_job

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    assert parameters_of_the_job(model) == 3 * 4 + 4 + 4 * 2 + 2
    model[0].requires_grad_(False)
    assert parameters_of_the_job(model) == 4 * 2 + 2


def test_times_of_a_start_that_finds_all_steps_done() -> None:
    from megakit.training.progress import DataClock, Reporter

    writer: Any = SimpleNamespace(seconds=2.0)
    reporter = Reporter(None, "pretrain", writer, None, None)  # type: ignore[arg-type]
    reporter.load_state_dict({"seconds": 100.0, "validation_seconds": 10.0})
    times = reporter.times(7.0, DataClock())
    assert times.pop("start_up") == 7.0
    assert set(times.values()) == {0.0}


def test_values_of_an_earlier_validation_are_dropped() -> None:
    """Lightning keeps them until they are logged again."""
    from megakit.training.progress import Reporter

    reporter = Reporter(None, "pretrain", None, None, None)  # type: ignore[arg-type]
    logged = {"val_rare": 7.0, "val_loss": 1.0, "train_loss": 2.0}
    trainer: Any = SimpleNamespace(callback_metrics=logged)
    module: Any = None
    reporter.on_validation_start(trainer, module)
    assert logged == {"train_loss": 2.0}
