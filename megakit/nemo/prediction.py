"""Keeps what a Lightning module predicts."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from megatron.core import parallel_state

from megakit.training.outputs import Outputs, OutputsOfRanks


class PredictionWriter(pl.Callback):
    """Keeps what `predict_step` returns, in memory.

    `outputs` returns what `trainer.predict(module, data)` has predicted. `predict_step` returns
    what `OutputsOfRanks.add` takes.

    Args:
        folder: A folder that all ranks share, for a file of each rank; its parent exists. The
            caller removes it.

    Attributes:
        collected: The outputs of the last prediction on this rank.
        seconds: Seconds of the last prediction.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, 0.0

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()
        self.collected = OutputsOfRanks(self.folder)

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Keeps a batch's outputs.

        Raises:
            UserError: `predict_step` returned something else, or memory is too small for all.
        """
        # Lightning 2.4 has an error in `return_predictions=False` with NeMo's data loading.
        trainer.predict_loop.predictions.clear()
        ranks = parallel_state.get_data_parallel_world_size()
        self.collected.add(outputs, sum(trainer.num_predict_batches) * ranks)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self.seconds = time.perf_counter() - self._began

    def outputs(self) -> Outputs | None:
        """Returns the outputs of all ranks on rank 0, None on other ranks; all ranks call it."""
        return self.collected.join()
