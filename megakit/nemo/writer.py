"""Writes each checkpoint completely or not at all.

NeMo's own ModelCheckpoint writes in place, so an interrupted first save prevents the next start.
Its file names contain the loss of the previous validation. `CheckpointWriter` lets NeMo's strategy
write into a hidden folder, adds context and manifest, and renames the complete folder.
"""

import re
import shutil
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from megakit.checkpoints.manifest import (
    CONTEXT,
    WEIGHTS,
    Files,
    Manifest,
    checkpoint_name,
    describe,
    list_files,
    write_manifest,
)
from megakit.checkpoints.model_settings import write_context
from megakit.checkpoints.select import best_of, own_checkpoints, remove
from megakit.runtime.atomic_files import publish


class CheckpointWriter(Checkpoint):
    """Saves at an interval and after the last step; keeps the best and the last checkpoint.

    If a step is validated and saved, the validation runs first. The checkpoint then contains its
    own validation loss.

    Args:
        folder: The folder of the checkpoints.
        manifest: The content of each manifest, except step, validated values and files.
        every_n_steps: The interval in optimizer steps.
        best_by: How the best checkpoint is chosen: see `best_of`.
        copied: Files to copy into each checkpoint, if they exist.

    Attributes:
        last_model_path: The newest checkpoint, or "".
        best_model_path: The best checkpoint, or "".
        seconds: Seconds spent saving, in all starts of the run.
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
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.every_n_steps = every_n_steps
        self.best_by = best_by
        self.best_is_highest = False
        self.wanted_step: int | None = None
        self.copied = copied
        self.last_model_path = ""
        self.best_model_path = ""
        self.seconds = 0.0
        #: The values of the last validation, by its step.
        self._validated: dict[int, dict[str, float]] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Finds the checkpoints of earlier starts, and removes those that a killed start left."""
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
        if own := self._find_own():
            last = next(reversed(own))
            self.last_model_path = str(last)
            if stage == "fit" and trainer.is_global_zero:
                self._prune(last)

    def _find_own(self) -> dict[Path, Manifest]:
        """Returns the checkpoints of this run, oldest first; stores the path of the best one."""
        own = own_checkpoints(self.folder, self.manifest.stage, self.manifest.run)
        self.best_model_path = str(best_of(own, self.best_by) or "")
        return own

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Saves if a save is due; if validation is also due, the save follows the validation."""
        if self._is_due(trainer) and not validation_is_due(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stores the validated values, and saves if a save is due."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._validated = {trainer.global_step: logged_values(trainer, "val_")}
        if self._is_due(trainer):
            self.save(trainer)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        step = trainer.global_step
        is_last = step == trainer.max_steps or trainer.should_stop
        return step % self.every_n_steps == 0 or is_last or step == self.wanted_step

    def save(self, trainer: pl.Trainer, store_values: bool = True) -> Path:
        """Writes a checkpoint of the current state, and returns its folder.

        Every rank has to call this method. A checkpoint of a stop signal does not store the
        validated values of its step, so it is not chosen as the best.

        Raises:
            OSError: The checkpoint could not be written; earlier checkpoints are not changed.
        """
        started = time.perf_counter()
        final = self.folder / checkpoint_name(trainer.global_step)
        if str(final) != self.last_model_path:
            partial = self.folder / f".{final.name}"
            try:
                self._write(trainer, partial, final, store_values)
            except BaseException as error:
                if trainer.is_global_zero:
                    shutil.rmtree(partial, ignore_errors=True)
                reason = why_not_written(error)
                if reason is None:
                    raise
                raise OSError(f"cannot save {final}: {reason}") from error
            self.last_model_path = str(final)
            self._find_own()
        self.seconds += time.perf_counter() - started
        return final

    def _write(self, trainer: pl.Trainer, partial: Path, final: Path, store_values: bool) -> None:
        if trainer.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()  # an error if the run directory was removed
        trainer.strategy.barrier("folder made")
        trainer.save_checkpoint(partial)  # into partial/weights
        hashed = hash_weights(trainer, partial)
        if trainer.is_global_zero:
            write_context(partial / CONTEXT, trainer.lightning_module)
            for path in self.copied:
                if path.exists():
                    shutil.copyfile(path, partial / path.name)
            step = trainer.global_step
            values = dict(self._validated.get(step, {})) if store_values else {}
            manifest = replace(
                self.manifest,
                model=_model_name(trainer.lightning_module),
                step=step,
                val_loss=values.pop("val_loss", None),
                values=values,
                higher_is_better=self.best_is_highest,
                final=trainer.should_stop and step != trainer.max_steps,
                files=list_files(partial, hashed) | hashed,
            )
            write_manifest(partial, manifest)
            publish(partial, final)
            self._prune(final)
        trainer.strategy.barrier("checkpoint complete")

    def _prune(self, last: Path) -> None:
        own = self._find_own()
        for checkpoint in own.keys() - {Path(self.best_model_path), last}:
            remove(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this callback for a checkpoint."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of this callback from a checkpoint."""
        self.seconds = float(state_dict["seconds"])


def hash_weights(trainer: pl.Trainer, checkpoint: Path) -> Files:
    """Hashes the weights that this rank wrote; returns the files that all ranks have hashed.

    Megatron and torch name them `__RANK_NUMBER.distcp`. A rank sees its own files at once on every
    shared file system, and mostly reads them from memory. Rank 0 hashes all files that remain, so
    every file is hashed, whatever its name.
    """
    found = (checkpoint / WEIGHTS).glob(f"__{trainer.global_rank}_*")
    own = {f"{WEIGHTS}/{path.name}": describe(path) for path in found}
    parts = [own] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(parts, own)
    return {name: file for part in parts for name, file in part.items()}


def _model_name(module: Any) -> str:
    """Returns the name of the class of the model that a Lightning module trains."""
    model_class: type = getattr(getattr(module, "config", None), "model_cls", type(module))
    return model_class.__name__


def validation_is_due(trainer: pl.Trainer) -> bool:
    """Asks the trainer's `StepLoop` whether a validation follows the last step."""
    return bool(trainer.fit_loop.epoch_loop.validation_is_due())


def logged_values(trainer: pl.Trainer, prefix: str) -> dict[str, float]:
    """Returns the last logged values by column of metrics.csv; a prefix is `val_` or `train_`.

    The values leave their device together.
    """
    metrics = trainer.callback_metrics.items()
    logged = {name: torch.as_tensor(v) for name, v in metrics if name.startswith(prefix)}
    if not logged:
        return {}
    device = next(iter(logged.values())).device
    together = torch.stack([value.to(device).reshape(()) for value in logged.values()])
    return dict(zip(logged, together.tolist(), strict=True))


def why_not_written(error: BaseException) -> str | None:
    """Returns the system's reason for a failed save; None if the program caused the error.

    The error of another rank, or of torch's archive writer, contains the reason as text only.
    """
    text = "".join(traceback.format_exception(error))
    if reason := re.search(r"\[Errno \d+\] ([^:\n]+)", text):
        return reason[1]
    if "inline_container" in text or "PytorchStreamWriter" in text:
        return "a file could not be written completely, as on a full disk"
    return None
