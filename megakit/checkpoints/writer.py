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
    """Saves every so many steps and after the last; keeps the best checkpoint and the last.

    Where validation falls on the same step it comes first, so that the checkpoint knows its own
    validation loss.

    Args:
        folder: Where checkpoints go.
        manifest: What to write of each but step, loss and files.
        every_n_steps: Save after every so many optimizer steps.
        best_by: How the best is chosen: see `best_checkpoint`.
        copied: Files that each checkpoint gets a copy of, where they exist.
        check_place: Raises where `folder` is not this run's any more; called before each save.

    Attributes:
        last_model_path: The newest checkpoint, or "".
        best_model_path: The best one, or "".
        seconds: Time spent saving.
        best_is_highest: Whether the best checkpoint has the highest value of `best_by`.
        wanted_step: A step whose checkpoint is written whatever the interval, or None.
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
        self._validated: tuple[int, dict[str, float]] | None = None
        self._saved_step: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Looks for what earlier starts of the run have left."""
        self._note_paths()
        if self.last_model_path:
            self._saved_step = step_of(Path(self.last_model_path))

    def _note_paths(self) -> None:
        own = own_checkpoints(self.folder, self.manifest.stage, self.manifest.run)
        self.last_model_path = str(next(reversed(own), ""))
        self.best_model_path = str(best_of(own, self.best_by) or "")

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
        self._validated = (trainer.global_step, logged_values(trainer, "val_"))
        if self._is_due(trainer):
            self.save(trainer)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        step = trainer.global_step
        is_last = step == trainer.max_steps or trainer.should_stop
        return step % self.every_n_steps == 0 or is_last or step == self.wanted_step

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
        if step != self._saved_step:
            partial = self.folder / f".{final.name}"
            try:
                self.check_place()
                self._write(trainer, partial, final, regular)
            except BaseException as error:
                self.check_place()  # a folder that is gone is the better reason
                if trainer.is_global_zero:
                    shutil.rmtree(partial, ignore_errors=True)
                reason = _why_not_written(error)
                if reason is None:
                    raise
                free = shutil.disk_usage(self.folder.parent).free / 1e6
                raise OSError(
                    f"cannot save {final}: {reason} ({free:,.0f} MB are free on this disk)"
                ) from error
            self._saved_step = step
        self._note_paths()
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
            for path in self.copied:
                if path.exists():
                    shutil.copyfile(path, partial / path.name)
            values = {}
            if regular and self._validated is not None and self._validated[0] == step:
                values = dict(self._validated[1])
            manifest = replace(
                self.manifest,
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
                    _flush(Path(folder, name))
            if final.exists():  # somebody else put it there while this run was training
                set_aside(final, "foreign")
            partial.rename(final)
            _flush(self.folder)  # alone: what else lies in it is not this run's to open
            self._prune(final)
        trainer.strategy.barrier("checkpoint complete")

    def _prune(self, last: Path) -> None:
        own = own_checkpoints(self.folder, self.manifest.stage, self.manifest.run)
        best = best_of(own, self.best_by)
        for checkpoint in own:
            if checkpoint not in (best, last):
                remove(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint remembers of this callback."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting where the checkpoint stopped."""
        self.seconds = float(state_dict["seconds"])


def will_validate(trainer: pl.Trainer) -> bool:
    """Whether Lightning validates after the step that has just ended.

    Lightning also validates after a step in which a callback set `trainer.should_stop`.
    """
    is_due = is_validated(trainer, trainer.global_step) or trainer.should_stop
    return is_due and trainer.enable_validation


def is_validated(trainer: pl.Trainer, step: int) -> bool:
    """Whether a step is one after which the trainer's interval asks for validation."""
    return bool(step % trainer.val_check_batch == 0)


def logged_values(trainer: pl.Trainer, prefix: str) -> dict[str, float]:
    """Returns the values that were logged last, by column of metrics.csv.

    Args:
        trainer: Where they were logged.
        prefix: `val_` or `train_`, with which the columns begin.
    """
    logged = trainer.callback_metrics.items()
    return {name: float(value) for name, value in logged if name.startswith(prefix)}


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


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
