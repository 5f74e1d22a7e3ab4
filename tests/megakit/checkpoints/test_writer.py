"""When a checkpoint is written, what it contains, what a failed save leaves, and what is kept."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megakit.checkpoints.manifest import Manifest, read_manifest, verify, write_manifest
from megakit.checkpoints.store import CheckpointStore
from megakit.nemo.writer import CheckpointWriter, validation_is_due
from tests.disk import Disk
from tests.fabricate import SavingTrainer

FULL = OSError(errno.ENOSPC, "No space left on device")


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
    monkeypatch.setattr("megakit.nemo.writer.write_context", lambda folder, module: folder.mkdir())
    (tmp_path / "checkpoints").mkdir()
    store = CheckpointStore(tmp_path / "checkpoints", Manifest("pretrain", "M", "digits", 0))
    return CheckpointWriter(store, 10)


def run_to(
    writer: CheckpointWriter, trainer: Any, step: int, val_loss: float | None = None
) -> None:
    """One step as Lightning does it: its end, then its validation if it is due."""
    trainer.global_step = step
    writer.on_train_batch_end(trainer, trainer.lightning_module)
    if validation_is_due(trainer):
        trainer.callback_metrics["val_loss"] = torch.tensor(val_loss, dtype=torch.float64)
        writer.on_validation_end(trainer, trainer.lightning_module)


def steps(writer: CheckpointWriter) -> list[int]:
    return sorted(int(path.name.removeprefix("step=")) for path in writer.folder.iterdir())


def test_saved_at_the_interval_after_the_last_step_and_on_demand(writer: CheckpointWriter) -> None:
    trainer: Any = Trainer(val_every=15, max_steps=25)
    writer.wanted_step = 3
    saved = {}
    for step in range(1, 26):
        run_to(writer, trainer, step, 1 / step)
        if writer.last_model_path.endswith(f"={step:06}"):
            saved[step] = verify(Path(writer.last_model_path)).val_loss
    assert saved == {3: None, 10: None, 20: None, 25: 1 / 25}
    assert not verify(writer.folder / "step=000025").final  # it is the last one by its step
    trainer.should_stop, trainer.max_steps = True, 100
    run_to(writer, trainer, 26, 1 / 26)
    assert verify(writer.folder / "step=000026").final


def test_every_file_is_hashed_whatever_its_name(writer: CheckpointWriter, trainer: Any) -> None:
    """Rank 0 also hashes files with the name of another rank, or of none."""
    names = {"weights/__0_0.distcp", "weights/__1_0.distcp", "weights/more/__0_0.pt", "weights/x"}

    def save(folder: Path) -> None:
        (folder / "weights" / "more").mkdir(parents=True)
        for name in names:
            (folder / name).write_text(name)

    trainer.save_checkpoint = save
    run_to(writer, trainer, 10, 0.5)
    assert verify(Path(writer.last_model_path)).files.keys() == names


def test_best_and_last_are_kept(writer: CheckpointWriter, trainer: Any) -> None:
    kept = []
    for step, loss in ((10, 0.5), (20, 0.3), (30, 0.4), (40, float("nan")), (50, 0.2)):
        run_to(writer, trainer, step, loss)
        kept.append(steps(writer))
    assert kept == [[10], [20], [20, 30], [20, 40], [50]]


def test_a_stop_s_checkpoint_is_never_the_best_and_goes(
    writer: CheckpointWriter, trainer: Any
) -> None:
    run_to(writer, trainer, 10, 0.5)
    before = read_manifest(writer.folder / "step=000010")
    writer.save(trainer, store_values=False)
    assert read_manifest(writer.folder / "step=000010") == before
    trainer.val_check_interval = 15
    run_to(writer, trainer, 15, 0.1)
    writer.save(trainer, store_values=False)
    assert steps(writer) == [10, 15]
    assert writer.best_model_path.endswith("step=000010")
    trainer.val_check_interval = 10
    run_to(writer, trainer, 20, 0.6)
    assert steps(writer) == [10, 20]


def test_others_checkpoints_stay(writer: CheckpointWriter, trainer: Any) -> None:
    run_to(writer, trainer, 10, 0.5)
    own = writer.folder / "step=000010"
    other = Path(shutil.copytree(own, writer.folder / "step=000011"))
    manifest = replace(read_manifest(own), step=11, run={"seed": 7}, val_loss=0.001)
    write_manifest(other, manifest)
    shutil.copytree(own, writer.folder / "step=000012")  # damaged
    run_to(writer, trainer, 20, 0.4)
    assert steps(writer) == [11, 12, 20]
    assert writer.best_model_path.endswith("step=000020")


def test_a_checkpoint_appears_when_it_is_whole_and_on_the_disk(
    writer: CheckpointWriter, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(source: Path, target: Path) -> None:
        if target == writer.folder / "step=000020":
            verify(source)

    disk = Disk(monkeypatch, check)
    run_to(writer, trainer, 10, 0.5)
    run_to(writer, trainer, 20, 0.4)
    appears = disk.events.index("rename .step=000020 to step=000020")
    assert disk.events[appears + 1 :] == [
        "flush checkpoints",
        "rename step=000010 to .removing-step=000010",
    ]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            CheckpointException("", {0: (FULL, None)}),  # type: ignore[dict-item]
            r"cannot save .*step=000020: No space left on device$",
        ),
        (RuntimeError("[enforce fail at inline_container.cc:672]"), "could not be written"),
        (ValueError("a bug"), "^a bug$"),
    ],
    ids=["full", "torch's archive", "of the program"],
)
def test_an_interrupted_save_leaves_nothing(
    writer: CheckpointWriter, trainer: Any, error: BaseException, reason: str
) -> None:
    run_to(writer, trainer, 10, 0.5)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    trainer.save_checkpoint, save = fail, trainer.save_checkpoint
    with pytest.raises(ValueError if isinstance(error, ValueError) else OSError, match=reason):
        run_to(writer, trainer, 20, 0.4)
    assert steps(writer) == [10]
    verify(writer.folder / "step=000010")
    trainer.save_checkpoint = save
    run_to(writer, trainer, 20, 0.4)
    assert steps(writer) == [20]
