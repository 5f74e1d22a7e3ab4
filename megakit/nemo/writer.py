"""Saves a training of Lightning into megakit's checkpoints.

NeMo's own ModelCheckpoint writes in place, so an interrupted first save prevents the next start.
Its file names contain the loss of the previous validation. `CheckpointWriter` lets NeMo's strategy
write into the hidden folder of a `CheckpointStore`.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from megakit.checkpoints.manifest import CONTEXT
from megakit.checkpoints.store import CheckpointStore


class CheckpointWriter(Checkpoint):
    """Saves at an interval and after the last step; keeps the best and the last checkpoint.

    If a step is validated and saved, the validation runs first. The checkpoint then contains its
    own validation loss.

    Args:
        store: Writes and selects the checkpoints.
        every_n_steps: The interval in optimizer steps.

    Attributes:
        wanted_step: A step to save in addition to the interval, or None.
    """

    def __init__(self, store: CheckpointStore, every_n_steps: int) -> None:
        self.store, self.every_n_steps = store, every_n_steps
        self.wanted_step: int | None = None
        #: The values of the last validation, by its step.
        self._validated: dict[int, dict[str, float]] = {}

    folder = property(lambda self: self.store.folder)
    best_by = property(lambda self: self.store.best_by)
    best_model_path = property(lambda self: self.store.best)
    seconds = property(lambda self: self.store.seconds)

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint."""
        return self.store.last

    @last_model_path.setter
    def last_model_path(self, path: object) -> None:  # NeMo's AutoResume sets it
        self.store.last = str(path)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Finds the checkpoints of earlier starts, and removes those that a killed start left."""
        self.store.open(prune=stage == "fit")

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
        step, module = trainer.global_step, trainer.lightning_module
        return self.store.save(
            step,
            trainer.save_checkpoint,  # into the folder's `weights`
            self._validated.get(step) if store_values else None,
            describe_model=lambda folder: write_context(folder / CONTEXT, module),
            model=_model_name(module),
            final=trainer.should_stop and step != trainer.max_steps,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this callback for a checkpoint."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of this callback from a checkpoint."""
        self.store.seconds = float(state_dict["seconds"])


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


def write_context(folder: Path, module: Any) -> None:
    """Writes a Lightning module's settings for NeMo's `io.load_context(..., "model")`.

    The trainer is left out, because NeMo would pickle its callbacks, strategy and plugins.
    """
    from nemo.lightning.io.pl import TrainerContext

    TrainerContext(model=module, trainer=None, extra={}).io_dump(folder, yaml_attrs=[])
