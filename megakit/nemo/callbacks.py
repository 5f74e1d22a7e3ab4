"""Provides callbacks that check options, find the best value, and stop training."""

import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping

from megakit.errors import Stopped, UserError
from megakit.nemo.validation import higher_is_better
from megakit.nemo.writer import CheckpointWriter, logged_values
from megakit.training.step_seeds import seed_generators
from megakit.training.stopping import StopSignals

#: Lightning's and NeMo's modules have configs without a seed.
DEFAULT_SEED = 1234


class StepSeeds(pl.Callback):
    """Seeds torch's random generators at each training step, for dropout and other random numbers.

    Checkpoints do not contain the states of all ranks' generators. The seed of a step is derived
    from the seed of the model's config, the step, the pipeline stage and the data-parallel rank. So
    a resumed training draws the numbers of an uninterrupted one under the same layout. Tensor-
    parallel ranks have the same default generator, and different generators in Megatron's tracker.
    """

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        """Seeds the generators, unless a CUDA graph makes the steps: it refuses random numbers."""
        if getattr(trainer.strategy, "step_graph", None) is None:
            seed = getattr(getattr(module, "config", None), "seed", DEFAULT_SEED)
            seed_generators(seed, trainer.global_step)


class BestValue(EarlyStopping):
    """Checks the column that `--best-by` names, and stops after validations without a better value.

    Each better value gets a checkpoint, at any save interval. The last one is saved as final. All
    ranks have the same validated values, so all ranks stop after the same step.

    Args:
        writer: Writes the checkpoints, and has the name of the column.
        stop_after: The number of validations in succession without a better value after which
            training stops; None: training does not stop early.
    """

    def __init__(self, writer: CheckpointWriter, stop_after: int | None) -> None:
        super().__init__(
            writer.best_by,
            patience=sys.maxsize if stop_after is None else stop_after,
            check_finite=False,  # NaN is no better value, and no reason to stop
            check_on_train_epoch_end=False,
        )
        self.writer = writer
        self.stops = stop_after is not None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets one validation step before training check the name of the column."""
        if self.monitor != "val_loss":
            trainer.num_sanity_val_steps = 1

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets whether a higher or a lower value is better."""
        if higher_is_better(self.monitor, trainer, pl_module):
            self.writer.store.best_is_highest = True
            self.mode, self.best_score = "max", torch.tensor(-torch.inf)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the new value with the best one.

        Raises:
            UserError: There is no validated column of this name.
        """
        values = logged_values(trainer, "val_")
        if trainer.state.fn == "fit" and self.monitor not in values:
            raise UserError(
                f"--best-by {self.monitor}: there is no such validated value. "
                f"There are {', '.join([*values, 'last'])}."
            )
        super().on_validation_end(trainer, pl_module)
        if self.stops and self.wait_count == 0 and not trainer.sanity_checking:
            self.writer.wanted_step = trainer.global_step


class StopOnSignal(pl.Callback):
    """Saves a checkpoint and ends training after the step in which a stop signal arrived.

    Args:
        writer: Writes the checkpoint.
        say: Prints a line for the user.
    """

    def __init__(self, writer: CheckpointWriter, say: Callable[[str], object]) -> None:
        self.writer, self.signals = writer, StopSignals(say)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Installs the signal handlers for training."""
        if stage == "fit":
            self.signals.__enter__()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Installs the signal handlers again, because Lightning has installed its own."""
        self.signals.__enter__()
        # Lightning's handler also called ours. Lightning itself would stop without a checkpoint.
        trainer._signal_connector.received_sigterm = False

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restores the previous signal handlers."""
        self.signals.__exit__()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lets the ranks agree before the next step: they have waited for each other anyway."""
        self.signals.agree_at = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Stops after a signal, when the previous step, its validation and its save are complete.

        Raises:
            Stopped: A rank received a signal.
        """
        if number := self.signals.received(trainer.global_step):
            self.writer.save(trainer, store_values=False)
            raise Stopped(number, trainer.global_step)
