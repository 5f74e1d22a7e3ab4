"""Writing checkpoints that are complete or not there.

NeMo's own ModelCheckpoint writes in place and marks what is unfinished with a file beside it: cut
off during the first save it leaves a run that cannot start again, and its file names carry the
validation loss of the time before. This callback lets NeMo's strategy write into a hidden folder,
adds context and manifest, and makes the whole visible by one rename.
"""

import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from megakit.checkpoints.context import write_context
from megakit.checkpoints.layout import (
    CONTEXT,
    checkpoint_name,
    list_checkpoints,
)
from megakit.checkpoints.manifest import Manifest, list_files, write_manifest
from megakit.checkpoints.select import BestBy, best_checkpoint


class CheckpointWriter(Checkpoint):
    """Saves every so many steps and after the last; keeps the best checkpoint and the last.

    Where validation falls on the same step it comes first, so that the checkpoint knows its own
    validation loss.

    Args:
        folder: Where checkpoints go.
        manifest: What to write of each but step, loss and files.
        every_n_steps: Save after every so many optimizer steps.
        best_by: How the best is chosen.

    Attributes:
        last_model_path: The newest checkpoint, or "".
        best_model_path: The best one, or "".
        seconds: Time spent saving.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, every_n_steps: int, best_by: BestBy = "val_loss"
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.every_n_steps = every_n_steps
        self.best_by: BestBy = best_by
        self.last_model_path = ""
        self.best_model_path = ""
        self.seconds = 0.0
        self._validated: tuple[int, float] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Looks for what earlier starts of the run have left."""
        if checkpoints := list_checkpoints(self.folder):
            self.last_model_path = str(checkpoints[-1])
            self.best_model_path = str(best_checkpoint(self.folder, self.best_by) or "")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Saves if it is time, unless validation, which comes after this hook, is due as well."""
        if self._is_due(trainer) and not will_validate(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes the validation loss, and saves if it is time."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._validated = (trainer.global_step, float(trainer.callback_metrics["val_loss"]))
        if self._is_due(trainer):
            self.save(trainer)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        step = trainer.global_step
        return step % self.every_n_steps == 0 or step == trainer.max_steps

    def save(self, trainer: pl.Trainer, regular: bool = True) -> Path:
        """Writes a checkpoint of this moment; every rank has to call it.

        Args:
            trainer: Whose state is saved.
            regular: Whether it may be the best one; one saved by a stop may not.

        Returns:
            Where it is.

        Raises:
            OSError: It could not be written; those from before are untouched.
        """
        started = time.perf_counter()
        step = trainer.global_step
        final = self.folder / checkpoint_name(step)
        if not final.exists():
            partial = self.folder / f".{final.name}"
            try:
                self._write(trainer, partial, final, regular)
            except BaseException as error:
                if trainer.is_global_zero:
                    shutil.rmtree(partial, ignore_errors=True)
                reason = _why_not_written(error)
                if reason is None:
                    raise
                free = f"{shutil.disk_usage(self.folder).free / 1e6:,.0f} MB are free on this disk"
                raise OSError(f"cannot save {final}: {reason} ({free})") from error
        self.last_model_path = str(final)
        self.best_model_path = str(best_checkpoint(self.folder, self.best_by) or "")
        self.seconds += time.perf_counter() - started
        return final

    def _write(self, trainer: pl.Trainer, partial: Path, final: Path, regular: bool) -> None:
        """Writes into a hidden folder, which gets its real name once all of it is on disk."""
        step = trainer.global_step
        if trainer.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        trainer.strategy.barrier("folder made")
        trainer.save_checkpoint(partial)  # into partial/weights
        if trainer.is_global_zero:
            write_context(partial / CONTEXT, trainer.lightning_module)
            val_loss = None
            if regular and self._validated is not None and self._validated[0] == step:
                val_loss = self._validated[1]
            manifest = replace(
                self.manifest, step=step, val_loss=val_loss, files=list_files(partial)
            )
            write_manifest(partial, manifest)
            _to_disk(partial)
            partial.rename(final)
            _to_disk(self.folder)
            self._prune(final)
        trainer.strategy.barrier("checkpoint complete")

    def _prune(self, last: Path) -> None:
        best = best_checkpoint(self.folder, self.best_by)
        for checkpoint in list_checkpoints(self.folder):
            if checkpoint not in (best, last):
                # Renamed first: cut off in the middle, a removal leaves nothing that looks whole.
                doomed = checkpoint.rename(checkpoint.with_name(f".removing-{checkpoint.name}"))
                shutil.rmtree(doomed)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint remembers of this callback."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting where the checkpoint stopped."""
        self.seconds = float(state_dict["seconds"])


def will_validate(trainer: pl.Trainer) -> bool:
    """Whether Lightning validates after the step that has just ended."""
    return bool(trainer.global_step % trainer.val_check_batch == 0) and trainer.enable_validation


def _why_not_written(error: BaseException) -> str | None:
    """What the system had against a save; None if the reason lies in the program.

    torch collects the errors of all ranks in one that is no `Exception`, and its own archive writer
    does not tell what went wrong with the file.
    """
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        found = waiting.pop(0)
        if isinstance(found, OSError):
            return found.strerror or str(found)
        seen.append(found)
        failures = getattr(found, "failures", None)
        behind = [found.__cause__, found.__context__]
        if isinstance(failures, dict):
            behind += [failure[0] for failure in failures.values()]
        waiting += [one for one in behind if one is not None and one not in seen]
    for one in seen:
        # An error that came from another rank, or through torch, has only its text left.
        if told := re.search(r"\[Errno \d+\] ([^:\n]+)", str(one)):
            return told.group(1)
    if any(
        word in str(one) for one in seen for word in ("inline_container", "PytorchStreamWriter")
    ):
        return "a file could not be written to its end"
    return None


def _to_disk(folder: Path) -> None:
    """Waits until a folder and all below it is on disk, names included."""
    for directory, _, files in os.walk(folder):
        for name in [".", *files]:
            descriptor = os.open(Path(directory) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
