"""What a run reports of its steps, where its time goes, and how many numbers it trains."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.megakit.reporting.test_tensorboard import open_board, points

pytestmark = pytest.mark.usefixtures("megatron")

BATCH = 4
#: Of a simulated training: its first step, another step, a validation and a save.
FIRST_STEP_SECONDS, STEP_SECONDS, VALIDATION_SECONDS, SAVE_SECONDS = 2.0, 0.5, 3.0, 1.0


def stand_in(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


class Simulated:
    """A start of a run of 50 steps on a clock of its own: it calls a `Reporter` as Lightning does.

    It validates after every 15th and the last step, and saves after every tenth step. The values of
    step n are multiples of n.

    Attributes:
        states: What the checkpoints contain, by step.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, state: Any = None) -> None:
        import torch

        from megakit.reporting.metrics import MetricsFile
        from megakit.training import progress

        step = 0 if state is None else state["step"]
        self.now = 1000.0 * (1 + step)  # no clock goes on where another start's has stopped
        monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.said: list[str] = []
        self.begun: list[tuple[str, int, int]] = []
        self.shown: dict[int, dict[str, float]] = {}
        self.num_closed = 0
        self.states: dict[int, dict[str, Any]] = {}
        self.writer = stand_in(seconds=0.0 if state is None else state["saving"])
        self.reporter = progress.Reporter(
            self,  # type: ignore[arg-type]  # as a console
            "pretrain",
            self.writer,
            MetricsFile(folder / "metrics.csv", after=step),
            open_board(folder / f"from {step}", after=step),
        )
        if state is not None:
            self.reporter.load_state_dict(state["reporter"])
        weights = [torch.nn.Parameter(torch.zeros(4, 2))]
        self.module = stand_in(parameters=lambda: weights)
        self.group = {"lr": (step + 1) / 1000}
        self.trainer = stand_in(
            global_step=step,
            max_steps=50,
            val_check_interval=15,
            enable_validation=True,
            sanity_checking=False,
            should_stop=False,
            state=SimpleNamespace(fn="fit"),
            callback_metrics={},
            datamodule=SimpleNamespace(data_sampler=SimpleNamespace(global_batch_size=BATCH)),
            optimizers=[SimpleNamespace(param_groups=[self.group])],
            profiler=None,
            strategy=SimpleNamespace(root_device=torch.device("cpu"), grad_norm=None),
        )
        self.reporter.on_train_start(self.trainer, self.module)

    # As a console and as its progress display.

    def say(self, line: str) -> None:
        self.said.append(line)

    def progress(self, title: str, total: int, start: int) -> "Simulated":
        self.begun.append((title, total, start))
        return self

    def update(self, step: int, values: dict[str, float]) -> None:
        self.shown[step] = values

    def close(self) -> None:
        self.num_closed += 1

    # As Lightning and the checkpoint writer.

    def run(self, last: int, stops_early: bool = False) -> "Simulated":
        import torch

        from megakit.checkpoints.writer import validation_is_due

        trainer, reporter = self.trainer, self.reporter
        while trainer.global_step < last:
            reporter.on_train_batch_start(trainer, None, 0)
            self.now += STEP_SECONDS if trainer.global_step else FIRST_STEP_SECONDS
            step = trainer.global_step = trainer.global_step + 1
            trainer.strategy.grad_norm = 10.0 * step
            trainer.callback_metrics["train_extra"] = torch.tensor(5.0 * step)
            self.group["lr"] = (step + 1) / 1000  # Lightning sets the next step's rate here
            trainer.should_stop = stops_early and step == last
            outputs: Any = {"loss": torch.tensor(2.0 * step), "margin": torch.tensor(3.0 * step)}
            reporter.on_train_batch_end(trainer, self.module, outputs, None, 0)
            if validation_is_due(trainer, step):
                self.validate()
            if step % 10 == 0:
                reporter.on_save_checkpoint(trainer, self.module, {})
                saved = {"step": step, "reporter": reporter.state_dict()}
                self.states[step] = saved | {"saving": self.writer.seconds}
                self.now += SAVE_SECONDS
                self.writer.seconds += SAVE_SECONDS
        return self

    def validate(self) -> None:
        import torch

        self.reporter.on_validation_start(self.trainer, self.module)
        self.now += VALIDATION_SECONDS
        step = self.trainer.global_step
        self.trainer.callback_metrics["val_loss"] = torch.tensor(7.0 * step)
        self.trainer.callback_metrics["val_top"] = torch.tensor(8.0 * step)
        self.reporter.on_validation_end(self.trainer, self.module)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts the run, from the beginning or from a checkpoint's state."""
    return lambda state=None: Simulated(tmp_path, monkeypatch, state)


def rows(folder: Path) -> list[str]:
    return (folder / "metrics.csv").read_text().splitlines()


def test_a_row_has_the_values_of_its_own_step(start: Any, tmp_path: Path) -> None:
    """No means over the steps between two rows, and nothing of the step before or after."""
    start().run(19)
    header = "step,consumed_samples,train_loss,val_loss,lr,grad_norm,train_margin,train_extra"
    assert rows(tmp_path) == [
        f"{header},val_top",
        "1,4,2,,0.001,10,3,5,",
        "10,40,20,,0.01,100,30,50,",
        "15,60,30,105,0.015,150,45,75,120",
    ]


@pytest.mark.parametrize("validation", [True, False])
def test_the_step_after_which_training_stops_early_has_a_row(
    start: Any, tmp_path: Path, validation: bool
) -> None:
    run = start()
    run.trainer.enable_validation = validation
    run.run(13, stops_early=True)
    assert rows(tmp_path)[-1].startswith("13,52,26,91," if validation else "13,52,26,,")
    assert run.shown[13]["validation"] == (91 if validation else None)


def test_progress_shows_this_step_and_the_last_validation(start: Any) -> None:
    run = start().run(20)
    assert run.said == ["  8 parameters, 50 steps of 4 samples"]
    assert run.begun == [("pretrain", 50, 0)]
    further = {"train_margin": 30.0, "train_extra": 50.0}
    assert run.shown[10] == {"loss": 20.0, "validation": None, **further}
    further = {"train_margin": 60.0, "train_extra": 100.0, "val_top": 120.0}
    assert run.shown[20] == {"loss": 40.0, "validation": 105.0, **further}


def test_a_resumed_start_goes_on_with_values_and_times(start: Any, tmp_path: Path) -> None:
    """Its checkpoint was saved after a validation, and a few more steps were lost."""
    from megakit.training.progress import DataClock

    first = start().run(34)
    run = start(first.states[30])
    assert run.begun == [("pretrain", 50, 30)]
    run.run(50)
    run.reporter.on_train_end(run.trainer, run.module)
    assert run.shown[40]["validation"] == 210  # of step 30, before the stop
    assert run.reporter.first["train_loss"] == 2
    assert run.reporter.last["train_loss"] == 100
    assert (run.reporter.first["val_loss"], run.reporter.last["val_loss"]) == (105, 350)
    # All starts, without the save and the steps that the checkpoint does not know.
    stepping = FIRST_STEP_SECONDS + 49 * STEP_SECONDS
    assert run.reporter.stepping_seconds == stepping
    assert run.reporter.validation_seconds == 4 * VALIDATION_SECONDS
    assert run.reporter.seconds == stepping + 4 * VALIDATION_SECONDS + 4 * SAVE_SECONDS
    # This start: 20 steps, two validations, two saves, and 42 of 60 seconds before the first step.
    clock = DataClock()
    clock.setup_seconds, clock.fetch_seconds = 2.0, 1.5
    times = run.reporter.times(60.0, clock)
    assert times == {
        "start_up": 40.0,
        "data": 3.5,
        "training": 8.5,
        "validation": 6.0,
        "checkpoints": 2.0,
    }
    assert sum(times.values()) == 60.0
    # Of the steps since the point before.
    speed, curve = BATCH / STEP_SECONDS, ("tensorboard/train", "pretrain/samples_per_second")
    first_point = (1, BATCH / FIRST_STEP_SECONDS)
    begun = [first_point, *((step, speed) for step in (10, 15, 20, 30))]
    assert points(tmp_path / "from 0" / curve[0], curve[1]) == begun
    resumed = [(step, speed) for step in (40, 45, 50)]
    assert points(tmp_path / "from 30" / curve[0], curve[1]) == resumed


def test_curves_are_on_disk_with_each_checkpoint(start: Any, tmp_path: Path) -> None:
    """A resumed run does not write them again."""
    run = start().run(15)
    run.reporter.on_save_checkpoint(run.trainer, run.module, {})
    for part, expected in (
        ("train", {"loss": 30.0, "lr": 0.015, "grad_norm": 150.0, "margin": 45.0, "extra": 75.0}),
        ("validation", {"loss": 105.0, "top": 120.0}),
    ):
        for name, value in expected.items():
            last = points(tmp_path / "from 0" / "tensorboard" / part, f"pretrain/{name}")[-1]
            assert last == pytest.approx((15, value)), name


@pytest.mark.parametrize("changed", ["fn", "sanity_checking"])
def test_only_validations_of_training_are_reported(
    start: Any, tmp_path: Path, changed: str
) -> None:
    """Not those of `trainer.validate()`, and not the check before training."""
    run = start()
    if changed == "fn":
        run.trainer.state.fn = "validate"
    else:
        run.trainer.sanity_checking = True
    run.validate()
    assert (run.reporter.val_loss, run.reporter.validation_seconds) == (None, 0)
    run.trainer.state.fn, run.trainer.sanity_checking = "fit", False
    run.run(1)
    assert rows(tmp_path)[-1] == "1,4,2,,0.001,10,3,5"


@pytest.mark.parametrize("event", ["on_train_end", "on_exception"])
def test_what_is_printed_next_starts_on_a_new_line(start: Any, event: str) -> None:
    run = start().run(3)
    assert run.num_closed == 0
    getattr(run.reporter, event)(run.trainer, run.module)
    assert run.num_closed == 1


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


def test_a_profiler_action_that_was_renamed_is_named() -> None:
    from megakit.training.progress import DataClock

    clock = DataClock()
    with clock.profile("[_TrainingEpochLoop].fetch_next"):
        pass
    with pytest.raises(RuntimeError, match=r"train_dataloader_next is gone from this version"):
        clock.check()
    with clock.profile(DataClock.FETCH):
        pass
    clock.check()
