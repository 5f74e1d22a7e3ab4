"""Writes each checkpoint completely or not at all.

NeMo's own ModelCheckpoint writes in place, and marks an unfinished checkpoint with a separate file.
If its first save is interrupted, the run cannot start again. Its file names contain the loss of the
previous validation. `CheckpointWriter` lets NeMo's strategy write into a hidden folder, adds
context and manifest, and publishes the checkpoint with one rename.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from megakit.checkpoints.context import write_context
from megakit.checkpoints.folders import CONTEXT, checkpoint_name, step_of
from megakit.checkpoints.manifest import Manifest, list_files, write_manifest
from megakit.checkpoints.select import best_of, own_checkpoints, remove, set_aside


class CheckpointWriter(Checkpoint):
    """Saves at an interval and after the last step; keeps the best and the last checkpoint.

    If a step is validated and saved, the validation runs first. The checkpoint then contains its
    own validation loss.

    Args:
        folder: The folder of the checkpoints.
        manifest: The content of each manifest, except step, validated values and files.
        every_n_steps: The number of optimizer steps between two saves.
        best_by: How the best checkpoint is chosen: see `best_checkpoint`.
        copied: Files to copy into each checkpoint, if they exist.
        check_place: Raises an error if `folder` no longer belongs to this run; called before each
            save and after a failed save.

    Attributes:
        last_model_path: The newest checkpoint, or "".
        best_model_path: The best checkpoint, or "".
        seconds: Seconds spent saving.
        best_is_highest: Whether the best checkpoint has the highest value of `best_by`.
        wanted_step: A step to save in addition to the interval, or None.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        every_n_steps: int,
        best_by: str = "val_loss",
        *,
        copied: Sequence[Path] = (),
        check_place: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.every_n_steps = every_n_steps
        self.best_by = best_by
        self.best_is_highest = False
        self.wanted_step: int | None = None
        self.copied = copied
        self.check_place = check_place
        self.last_model_path = ""
        self.best_model_path = ""
        self.seconds = 0.0
        #: The last validated step and its values.
        self._validated: tuple[int | None, dict[str, float]] = (None, {})
        self._saved_step: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Finds the checkpoints of the run's earlier starts.

        If a start was killed before it removed an older checkpoint, this removes the checkpoint.
        """
        self._find_paths()
        if self.last_model_path:
            last = Path(self.last_model_path)
            self._saved_step = step_of(last)
            if stage == "fit" and trainer.is_global_zero:
                self._prune(last)

    def _find_paths(self) -> None:
        own = own_checkpoints(self.folder, self.manifest.stage, self.manifest.run)
        self.last_model_path = str(next(reversed(own), ""))
        self.best_model_path = str(best_of(own, self.best_by) or "")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Saves if a save is due; if validation is also due, the save follows the validation."""
        if self._is_due(trainer) and not validation_is_due(trainer, trainer.global_step):
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stores the validated values, and saves if a save is due."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._validated = (trainer.global_step, logged_values(trainer, "val_"))
        if self._is_due(trainer):
            self.save(trainer)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        step = trainer.global_step
        is_last = step == trainer.max_steps or trainer.should_stop
        return step % self.every_n_steps == 0 or is_last or step == self.wanted_step

    def save(self, trainer: pl.Trainer, store_values: bool = True) -> Path:
        """Writes a checkpoint of the current state; every rank has to call this method.

        Args:
            trainer: The trainer with the state to save.
            store_values: Whether the checkpoint stores the validated values of its step. A
                checkpoint of a stop signal does not store them.

        Returns:
            The folder of the checkpoint.

        Raises:
            OSError: The checkpoint could not be written; earlier checkpoints are not changed.
        """
        started = time.perf_counter()
        step = trainer.global_step
        final = self.folder / checkpoint_name(step)
        if step != self._saved_step:
            partial = self.folder / f".{final.name}"
            try:
                self.check_place()
                self._write(trainer, partial, final, store_values)
            except BaseException as error:
                self.check_place()  # if the folder is lost, raises this clearer error
                if trainer.is_global_zero:
                    shutil.rmtree(partial, ignore_errors=True)
                reason = why_not_written(error)
                if reason is None:
                    raise
                free = shutil.disk_usage(self.folder.parent).free / 1e6
                raise OSError(
                    f"cannot save {final}: {reason} ({free:,.0f} MB are free on this disk)"
                ) from error
            self._saved_step = step
        self._find_paths()
        self.seconds += time.perf_counter() - started
        return final

    def _write(self, trainer: pl.Trainer, partial: Path, final: Path, store_values: bool) -> None:
        """Writes into a hidden folder, and renames the folder when all files are on disk."""
        step = trainer.global_step
        if trainer.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        trainer.strategy.barrier("folder made")
        trainer.save_checkpoint(partial)  # into partial/weights
        if trainer.is_global_zero:
            write_context(partial / CONTEXT, trainer.lightning_module)
            for path in self.copied:
                if path.exists():
                    shutil.copyfile(path, partial / path.name)
            validated_step, values = self._validated if store_values else (None, {})
            values = dict(values) if validated_step == step else {}
            manifest = replace(
                self.manifest,
                model=_model_name(trainer.lightning_module),
                step=step,
                val_loss=values.pop("val_loss", None),
                values=values,
                higher_is_better=self.best_is_highest,
                final=trainer.should_stop and step != trainer.max_steps,
                files=list_files(partial),
            )
            write_manifest(partial, manifest)
            for folder, _, files in os.walk(partial):
                for name in [".", *files]:
                    flush(Path(folder, name))
            if final.exists():  # another program created it during this training
                set_aside(final, "foreign")
            partial.rename(final)
            flush(self.folder)  # not its other files, which this run may not own
            self._prune(final)
        trainer.strategy.barrier("checkpoint complete")

    def _prune(self, last: Path) -> None:
        own = own_checkpoints(self.folder, self.manifest.stage, self.manifest.run)
        for checkpoint in own.keys() - {best_of(own, self.best_by), last}:
            remove(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this callback for a checkpoint."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of this callback from a checkpoint."""
        self.seconds = float(state_dict["seconds"])


def _model_name(module: Any) -> str:
    """Returns the name of the class of the model that a Lightning module trains."""
    model_class: type = getattr(getattr(module, "config", None), "model_cls", type(module))
    return model_class.__name__


def validation_is_due(trainer: pl.Trainer, step: int) -> bool:
    """Tells whether a validation follows a step.

    A validation follows the steps of the trainer's interval, the last step, and a step after which
    training stops early. The callback `ExactValidation` applies this decision to Lightning.
    """
    is_due = step % trainer.val_check_interval == 0 or step == trainer.max_steps
    return (is_due or trainer.should_stop) and trainer.enable_validation


def logged_values(trainer: pl.Trainer, prefix: str) -> dict[str, float]:
    """Returns the last logged values by column of metrics.csv; a prefix is `val_` or `train_`."""
    logged = trainer.callback_metrics.items()
    return {name: float(value) for name, value in logged if name.startswith(prefix)}


def why_not_written(error: BaseException) -> str | None:
    """Returns the system's reason for a failed save; None if the program caused the error.

    torch collects the errors of all ranks in one error that is not an `Exception`. The error of
    torch's archive writer does not contain the reason.
    """
    causes: list[BaseException] = [error]
    for found in causes:  # the list grows
        if isinstance(found, OSError):
            return found.strerror or str(found)
        failures = getattr(found, "failures", None)
        further = [found.__cause__, found.__context__]
        if isinstance(failures, dict):
            further += [failure[0] for failure in failures.values()]
        causes += [one for one in further if one is not None and one not in causes]
    text = "\n".join(map(str, causes))
    # An error from another rank, or from torch, is available as text only.
    if reason := re.search(r"\[Errno \d+\] ([^:\n]+)", text):
        return reason.group(1)
    if "inline_container" in text or "PytorchStreamWriter" in text:
        return "a file could not be written completely"
    return None


def flush(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
