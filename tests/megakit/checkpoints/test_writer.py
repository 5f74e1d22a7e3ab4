"""When a checkpoint is written, which ones are kept, and what a save that fails leaves behind."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megakit.checkpoints.folders import checkpoint_name
from megakit.checkpoints.manifest import Manifest, read_manifest, verify, write_manifest
from megakit.checkpoints.select import lock_checkpoint
from megakit.checkpoints.writer import CheckpointWriter, validation_is_due
from megakit.errors import RunDirectoryLostError
from tests.disk import Disk
from tests.fabricate import SavingTrainer


class Trainer(SavingTrainer):
    def __init__(self, val_every: int = 10, max_steps: int = 100) -> None:
        super().__init__(val_every, max_steps)

    def save_checkpoint(self, folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "__0_0.distcp").write_text(f"weights after {self.global_step}")


@pytest.fixture
def trainer() -> Any:
    return Trainer()


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointWriter:
    def write_context(folder: Path, module: Any) -> None:
        folder.mkdir()
        (folder / "io.json").write_text("{}")

    monkeypatch.setattr("megakit.checkpoints.writer.write_context", write_context)
    return CheckpointWriter(tmp_path / "checkpoints", Manifest("pretrain", "M", "digits", 0), 10)


def run_to(
    writer: CheckpointWriter, trainer: Any, step: int, val_loss: float | None = None
) -> None:
    """One step as Lightning does it: its end, then its validation if it is time."""
    trainer.global_step = step
    writer.on_train_batch_end(trainer, trainer.lightning_module)
    if validation_is_due(trainer, step):
        trainer.callback_metrics["val_loss"] = val_loss
        writer.on_validation_end(trainer, trainer.lightning_module)


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def names(writer: CheckpointWriter) -> list[str]:
    return sorted(path.name for path in writer.folder.iterdir())


@pytest.mark.parametrize("validates", [True, False])
def test_saved_at_the_interval_and_after_the_last_step(
    writer: CheckpointWriter, validates: bool
) -> None:
    trainer: Any = Trainer(val_every=7, max_steps=25)
    trainer.enable_validation = validates
    saved = []
    for step in range(1, 26):
        run_to(writer, trainer, step, 1 / step)
        saved += [step] if (writer.folder / checkpoint_name(step)).exists() else []
    assert saved == [10, 20, 25]
    last = verify(writer.folder / "step=000025")
    assert last.val_loss == (1 / 25 if validates else None)
    assert not last.final  # it is the last one by its step


def test_saved_where_that_is_wanted_and_where_the_run_stops_early(
    writer: CheckpointWriter, trainer: Any
) -> None:
    writer.wanted_step = 3
    run_to(writer, trainer, 3)
    assert not read_manifest(writer.folder / "step=000003").final
    trainer.should_stop = True
    run_to(writer, trainer, 5, 0.5)
    assert read_manifest(writer.folder / "step=000005").final
    trainer.max_steps = 7
    run_to(writer, trainer, 7, 0.5)
    assert not read_manifest(writer.folder / "step=000007").final


@pytest.mark.parametrize("change", ["sanity_checking", "state"])
def test_a_validation_that_follows_no_step_saves_nothing(
    writer: CheckpointWriter, trainer: Any, change: str
) -> None:
    trainer.sanity_checking = change == "sanity_checking"
    trainer.state.fn = "fit" if trainer.sanity_checking else "validate"
    trainer.global_step = 10
    trainer.callback_metrics["val_loss"] = 0.5
    writer.on_validation_end(trainer, trainer.lightning_module)
    assert not writer.folder.exists()


def test_any_validated_value_may_choose_the_best(writer: CheckpointWriter, trainer: Any) -> None:
    writer.best_by, writer.best_is_highest = "val_top", True
    for step, top in ((10, 0.7), (20, 0.9), (30, 0.8)):
        trainer.callback_metrics |= {"val_top": top, "train_loss": 1.0}
        run_to(writer, trainer, step, step / 100)
    assert names(writer) == ["step=000020", "step=000030"]
    assert Path(writer.best_model_path).name == "step=000020"
    best = read_manifest(writer.folder / "step=000020")
    assert (best.val_loss, best.values, best.higher_is_better) == (0.2, {"val_top": 0.9}, True)


def test_the_time_of_all_saves_is_counted(writer: CheckpointWriter, trainer: Any) -> None:
    again = CheckpointWriter(writer.folder, writer.manifest, 10)
    writer.seconds = 100.0
    run_to(writer, trainer, 10, 0.5)
    assert 100 < writer.seconds < 200
    again.load_state_dict(writer.state_dict())
    assert again.seconds == writer.seconds


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_writes_and_the_others_wait(
    writer: CheckpointWriter, trainer: Any, rank: int
) -> None:
    """Each rank writes its weights after the folder is made, and goes on after it is whole."""
    seen = []

    def see(name: str) -> None:
        seen.append((name, [path.name for path in writer.folder.glob("*")]))

    trainer.is_global_zero = rank == 0
    trainer.strategy.barrier = see
    trainer.save_checkpoint = lambda folder: see("weights")
    run_to(writer, trainer, 10, 0.5)
    partial, whole = ([".step=000010"], ["step=000010"]) if rank == 0 else ([], [])
    assert seen == [("folder made", partial), ("weights", partial), ("checkpoint complete", whole)]


def test_a_save_that_fails_on_another_rank_is_removed_by_rank_0(
    writer: CheckpointWriter, trainer: Any
) -> None:
    def fail(folder: Path) -> None:
        raise no_space()

    (writer.folder / ".step=000010").mkdir(parents=True)
    trainer.is_global_zero, trainer.save_checkpoint = False, fail
    with pytest.raises(OSError, match="No space left"):
        run_to(writer, trainer, 10, 0.5)
    assert names(writer) == [".step=000010"]


def test_a_checkpoint_appears_when_it_is_whole_and_on_the_disk(
    writer: CheckpointWriter, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure at any moment, a checkpoint is whole, or the one before is there."""

    def check(source: Path, target: Path) -> None:
        if target == writer.folder / "step=000020":
            verify(source)

    disk = Disk(monkeypatch, check)
    run_to(writer, trainer, 10, 0.5)
    open_files = num_open_files()
    run_to(writer, trainer, 20, 0.4)
    assert num_open_files() == open_files
    appears = disk.events.index("rename .step=000020 to step=000020")
    assert disk.events[appears + 1 :] == [
        "flush checkpoints",
        "rename step=000010 to .removing-step=000010",
    ]


def test_a_checkpoint_knows_its_own_validation_loss(writer: CheckpointWriter, trainer: Any) -> None:
    run_to(writer, trainer, 10, 0.5)
    manifest = verify(writer.folder / "step=000010")
    assert (manifest.step, manifest.val_loss) == (10, 0.5)
    assert writer.best_model_path == writer.last_model_path == str(writer.folder / "step=000010")


@pytest.mark.parametrize("changed", ["fn", "sanity_checking"])
def test_only_validations_of_training_save(
    writer: CheckpointWriter, trainer: Any, changed: str
) -> None:
    """Not `trainer.validate()`, and not the check before training."""
    if changed == "fn":
        trainer.state.fn = "validate"
    else:
        trainer.sanity_checking = True
    trainer.callback_metrics["val_loss"] = 0.1
    for step in (0, 10, trainer.max_steps):
        trainer.global_step = step
        writer.on_validation_end(trainer, trainer.lightning_module)
    assert not writer.folder.exists()


def test_a_resumed_start_knows_the_time_of_earlier_saves(
    writer: CheckpointWriter, trainer: Any
) -> None:
    run_to(writer, trainer, 10, 0.5)
    assert writer.state_dict() == {"seconds": writer.seconds}
    assert writer.seconds > 0
    writer.load_state_dict({"seconds": 100.0})
    run_to(writer, trainer, 20, 0.4)
    assert writer.seconds > 100


def test_one_that_was_not_validated_knows_none(writer: CheckpointWriter) -> None:
    trainer: Any = Trainer(val_every=15)
    run_to(writer, trainer, 10)
    run_to(writer, trainer, 15, 0.5)
    run_to(writer, trainer, 20)
    assert read_manifest(writer.folder / "step=000020").val_loss is None


def test_best_and_last_are_kept(writer: CheckpointWriter, trainer: Any) -> None:
    kept = []
    for step, loss in ((10, 0.5), (20, 0.3), (30, 0.4), (40, 0.35), (50, 0.2)):
        run_to(writer, trainer, step, loss)
        kept.append([int(name.removeprefix("step=")) for name in names(writer)])
    assert kept == [[10], [20], [20, 30], [20, 40], [50]]


def test_a_stops_checkpoint_is_never_the_best_and_goes(
    writer: CheckpointWriter, trainer: Any
) -> None:
    run_to(writer, trainer, 10, 0.5)
    trainer.global_step = 15
    writer.save(trainer, store_values=False)
    assert names(writer) == ["step=000010", "step=000015"]
    assert writer.best_model_path.endswith("step=000010")
    run_to(writer, trainer, 20, 0.6)
    assert names(writer) == ["step=000010", "step=000020"]


def test_a_stop_after_a_validated_step_does_not_count_either(writer: CheckpointWriter) -> None:
    trainer: Any = Trainer(val_every=5)
    run_to(writer, trainer, 5, 0.1)
    writer.save(trainer, store_values=False)
    assert read_manifest(writer.folder / "step=000005").val_loss is None


def test_a_stop_after_a_save_saves_nothing(writer: CheckpointWriter, trainer: Any) -> None:
    run_to(writer, trainer, 10, 0.5)
    before = read_manifest(writer.folder / "step=000010")
    writer.save(trainer, store_values=False)
    assert read_manifest(writer.folder / "step=000010") == before


def test_there_is_always_a_complete_one(
    writer: CheckpointWriter, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever something is removed or renamed, one that stays is complete."""
    complete: list[int] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if (writer.folder / "step=000010").exists() or complete:
                found = [p for p in writer.folder.glob("step=*") if verify(p)]
                assert found
                complete.append(len(found))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(shutil, "rmtree", watched(shutil.rmtree))
    monkeypatch.setattr(Path, "rename", watched(Path.rename))
    for step, loss in ((10, 0.5), (20, 0.3), (30, 0.4)):
        run_to(writer, trainer, step, loss)
    assert complete
    assert min(complete) >= 1


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def caused(how: str) -> RuntimeError:
    """An error with a system's error as its cause or context, and a loop as Python allows it."""
    error, loop = RuntimeError("the save failed"), RuntimeError("of it")
    loop.__context__ = error
    loop.__cause__ = no_space() if how == "__cause__" else None
    error.__context__ = loop if how == "__cause__" else no_space()
    return error


class Wrapped(BaseException):
    """As torch's CheckpointException, which is no Exception."""

    def __init__(self, *causes: BaseException) -> None:
        self.failures = {rank: (cause, None) for rank, cause in enumerate(causes)}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (no_space(), "No space left on device"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (Wrapped(RuntimeError("Worker failure"), no_space()), "No space left on device"),
        (Wrapped(RuntimeError(f"Worker failure: {no_space()}")), "No space left on device"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), "completely"),
        (OSError("no number"), "no number"),
        (caused("__cause__"), "No space left on device"),
        (caused("__context__"), "No space left on device"),
    ],
    ids=[
        *("full", "read-only", "wrapped", "text", "torch's archive"),
        *("no number", "a cause", "a context"),
    ],
)
def test_a_failed_save(
    writer: CheckpointWriter,
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    reason: str,
) -> None:
    free = {writer.folder.parent: 7e6}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    run_to(writer, trainer, 10, 0.5)

    def fail(folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "half").write_text("half")
        raise error

    trainer.save_checkpoint, save = fail, trainer.save_checkpoint
    with pytest.raises(OSError, match=rf"step=000020: .*{reason} \(7 MB are free"):
        run_to(writer, trainer, 20, 0.4)
    assert names(writer) == ["step=000010"]
    verify(writer.folder / "step=000010")

    trainer.save_checkpoint = save
    run_to(writer, trainer, 20, 0.4)
    assert names(writer) == ["step=000020"]


def test_an_error_of_the_program_stays_what_it_is(writer: CheckpointWriter, trainer: Any) -> None:
    def fail(folder: Path) -> None:
        error, other = ValueError("a bug"), KeyError("another")
        error.__cause__, other.__cause__ = other, error  # whose causes have no end
        raise error

    trainer.save_checkpoint = fail
    with pytest.raises(ValueError, match="a bug"):
        run_to(writer, trainer, 10, 0.5)
    assert names(writer) == []


def test_what_a_killed_save_left_is_replaced(writer: CheckpointWriter, trainer: Any) -> None:
    partial = writer.folder / ".step=000010"
    partial.mkdir(parents=True)
    (partial / "rest").write_text("of before")
    run_to(writer, trainer, 10, 0.5)
    assert names(writer) == ["step=000010"]
    assert not (writer.folder / "step=000010" / "rest").exists()


def test_an_earlier_starts_checkpoints_are_known(writer: CheckpointWriter, trainer: Any) -> None:
    run_to(writer, trainer, 10, 0.5)
    run_to(writer, trainer, 20, 0.6)
    again = CheckpointWriter(writer.folder, writer.manifest, 10)
    again.setup(trainer, trainer.lightning_module, "fit")
    assert Path(again.best_model_path).name == "step=000010"
    assert Path(again.last_model_path).name == "step=000020"
    again.save(trainer, store_values=False)  # a stop before the next step
    assert names(writer) == ["step=000010", "step=000020"]
    assert read_manifest(writer.folder / "step=000020").val_loss == 0.6


@pytest.mark.parametrize(
    ("rank", "stage", "is_removed"), [(0, "fit", True), (1, "fit", False), (0, "validate", False)]
)
def test_one_that_a_killed_start_left_is_removed(
    writer: CheckpointWriter,
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    stage: str,
    is_removed: bool,
) -> None:
    """It was killed after the rename of its last checkpoint; no later save may follow."""
    monkeypatch.setattr(writer, "_prune", lambda last: None)
    for step, loss in ((10, 0.6), (20, 0.4), (30, 0.5)):
        run_to(writer, trainer, step, loss)
    assert len(names(writer)) == 3
    again = CheckpointWriter(writer.folder, writer.manifest, 10)
    trainer.is_global_zero = rank == 0
    again.setup(trainer, trainer.lightning_module, stage)
    assert names(again) == ["step=000010", "step=000020", "step=000030"][is_removed:]


def test_one_that_is_being_read_is_kept_until_the_next_save(
    writer: CheckpointWriter, trainer: Any
) -> None:
    run_to(writer, trainer, 10, 0.5)
    run_to(writer, trainer, 20, 0.6)
    with lock_checkpoint(writer.folder / "step=000010"):
        run_to(writer, trainer, 30, 0.3)
        assert names(writer) == ["step=000010", "step=000030"]
        verify(writer.folder / "step=000010")
    run_to(writer, trainer, 40, 0.2)
    assert names(writer) == ["step=000040"]


def test_strangers_are_neither_chosen_nor_removed(writer: CheckpointWriter, trainer: Any) -> None:
    run_to(writer, trainer, 10, 0.5)
    for step, change in ((11, {"run": {"seed": 7}}), (12, {"stage": "finetune"})):
        stranger = shutil.copytree(
            writer.folder / "step=000010", writer.folder / f"step=0000{step}"
        )
        manifest = replace(read_manifest(writer.folder / "step=000010"), step=step, **change)
        write_manifest(stranger, replace(manifest, val_loss=0.001))
    damaged = Path(shutil.copytree(writer.folder / "step=000010", writer.folder / "step=000013"))
    run_to(writer, trainer, 20, 0.4)
    assert names(writer) == [*(f"step=0000{step}" for step in (11, 12, 13)), "step=000020"]
    assert Path(writer.best_model_path).name == "step=000020"
    assert damaged.is_dir()


def test_a_stranger_in_the_place_of_a_save_is_set_aside(
    writer: CheckpointWriter, trainer: Any
) -> None:
    run_to(writer, trainer, 10, 0.5)
    shutil.copytree(writer.folder / "step=000010", writer.folder / "step=000020")
    run_to(writer, trainer, 20, 0.4)
    assert names(writer) == ["foreign-step=000020", "step=000020"]
    assert verify(writer.folder / "step=000020").val_loss == 0.4


def test_each_has_a_copy_of_the_files_that_were_named(
    writer: CheckpointWriter, trainer: Any, tmp_path: Path
) -> None:
    writer.copied = [tmp_path / "metrics.csv", tmp_path / "not there"]
    (tmp_path / "metrics.csv").write_text("step\n10\n")
    run_to(writer, trainer, 10, 0.5)
    checkpoint = writer.folder / "step=000010"
    assert (checkpoint / "metrics.csv").read_text() == "step\n10\n"
    assert "metrics.csv" in verify(checkpoint).files


def test_nothing_is_written_where_the_folder_is_no_longer_the_runs(
    writer: CheckpointWriter, trainer: Any
) -> None:
    def lost() -> None:
        raise RunDirectoryLostError("removed")

    writer.check_place = lost
    with pytest.raises(RunDirectoryLostError):
        run_to(writer, trainer, 10, 0.5)
    assert not writer.folder.exists()


def test_a_folder_that_is_lost_during_a_save_is_the_reason_that_is_told(
    writer: CheckpointWriter, trainer: Any
) -> None:
    answers: list[Exception | None] = [None, RunDirectoryLostError("removed")]

    def check() -> None:
        if answer := answers.pop(0):
            raise answer

    def fail(folder: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    writer.check_place, trainer.save_checkpoint = check, fail
    with pytest.raises(RunDirectoryLostError):
        run_to(writer, trainer, 10, 0.5)


def test_what_else_lies_in_the_folder_is_not_opened(writer: CheckpointWriter, trainer: Any) -> None:
    """A checkpoint that was set aside may hold a pipe, which would block a save for ever."""
    aside = writer.folder / "damaged-step=000005"
    aside.mkdir(parents=True)
    os.mkfifo(aside / "pipe")
    (aside / "gone").symlink_to("/nowhere")
    run_to(writer, trainer, 10, 0.5)
    verify(writer.folder / "step=000010")


def test_a_first_save_into_a_folder_that_cannot_be_made(
    writer: CheckpointWriter, trainer: Any
) -> None:
    writer.folder.write_text("a file")
    with pytest.raises(OSError, match=r"cannot save .*step=000010: .*MB are free"):
        run_to(writer, trainer, 10, 0.5)


@pytest.mark.parametrize(
    ("change", "due"),
    [
        ({}, [10, 20, 25]),  # at the interval, and after the last step
        ({"should_stop": True}, list(range(1, 26))),
        ({"enable_validation": False}, []),
    ],
)
def test_steps_that_a_validation_follows(change: dict[str, Any], due: list[int]) -> None:
    trainer: Any = Trainer(val_every=10, max_steps=25)
    vars(trainer).update(change)
    assert [step for step in range(1, 26) if validation_is_due(trainer, step)] == due
