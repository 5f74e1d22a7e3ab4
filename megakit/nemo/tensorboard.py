"""Logs a run for TensorBoard: curves and hyperparameters.

TensorBoard lists each folder with files as a run of its own. A run therefore has one folder, and
the curve of each column of metrics.csv has the column's name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only


class RunLogger(TensorBoardLogger):
    """Writes the TensorBoard folder of one run; rank 0 of a job writes.

    Args:
        folder: The run directory.
        section: The TensorBoard section of this run's curves and pictures.
        resumed_step: The step that the run resumes from. Values of later steps, which an earlier
            start wrote, are hidden.
    """

    def __init__(self, folder: Path, section: str, resumed_step: int = 0) -> None:
        super().__init__(
            folder,
            name="",
            version="tensorboard",
            default_hp_metric=False,
            purge_step=resumed_step + 1,
        )
        self.section, self.resumed_step = section, resumed_step

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds values to the curves of their names."""
        for name, value in metrics.items():
            if name != "epoch":  # Lightning adds it
                self.experiment.add_scalar(f"{self.section}/{name}", float(value), step)

    @rank_zero_only
    def add_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Writes the settings of a run at its first start; None is left out."""
        if self.resumed_step > 0:
            return
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        plain = {
            name: value if isinstance(value, bool | int | float) else str(value)
            for name, value in values.items()
            if value is not None
        }
        self.log_hyperparams(plain)
        # Written without a step, because a resumed run hides entries of later steps. Lightning's
        # method also requires metrics; TensorBoard reads the metrics from the curves.
        self.experiment.file_writer.add_summary(hparams_pb(plain))

    def __deepcopy__(self, memo: object) -> "RunLogger":
        """Returns the object itself: NeMo copies loggers, and open files cannot be copied."""
        return self
