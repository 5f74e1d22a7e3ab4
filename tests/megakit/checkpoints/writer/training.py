"""A training that saves a line of text for its weights."""

import errno
from pathlib import Path
from typing import Any

from megakit.checkpoints.writer import CheckpointWriter, validation_is_due
from tests.fabricate import SavingTrainer


class Trainer(SavingTrainer):
    def __init__(self, val_every: int = 10, max_steps: int = 100) -> None:
        super().__init__(val_every, max_steps)

    def save_checkpoint(self, folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "__0_0.distcp").write_text(f"weights after {self.global_step}")


def run_to(
    writer: CheckpointWriter, trainer: Any, step: int, val_loss: float | None = None
) -> None:
    """One step as Lightning does it: its end, then its validation if it is time."""
    trainer.global_step = step
    writer.on_train_batch_end(trainer, trainer.lightning_module)
    if validation_is_due(trainer, step):
        trainer.callback_metrics["val_loss"] = val_loss
        writer.on_validation_end(trainer, trainer.lightning_module)


def names(writer: CheckpointWriter) -> list[str]:
    return sorted(path.name for path in writer.folder.iterdir())


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")
