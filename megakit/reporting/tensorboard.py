"""Writes a run for TensorBoard: curves, pictures, latent space and hyperparameters.

If curves in several folders have the same name, TensorBoard draws them in one chart. Training and
validation values therefore go to the folders `train` and `validation`, under the same names.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from numpy.typing import NDArray


class TensorBoard:
    """Writes the TensorBoard folder of one run; only one process of a job uses this class.

    Args:
        logger: Lightning's logger, which defines the folder and writes the hyperparameters.
        section: The TensorBoard section of this run's curves and pictures.
        after: The step that the run resumes from. Values of later steps, which an earlier start
            wrote, are hidden.
    """

    def __init__(self, logger: TensorBoardLogger, section: str, after: int = 0) -> None:
        self.logger, self.section, self.after = logger, section, after

    @cached_property
    def _writers(self) -> dict[str, Any]:
        from torch.utils.tensorboard import SummaryWriter

        return {
            part: SummaryWriter(Path(self.logger.log_dir, part), purge_step=self.after + 1)
            for part in ("train", "validation")
        }

    def add_values(self, part: str, values: Mapping[str, float | None], step: int) -> None:
        """Adds a value to each curve of the part `train` or `validation`; None is left out."""
        for name, value in values.items():
            if value is not None:
                self._writers[part].add_scalar(f"{self.section}/{name}", value, step)

    def add_image(self, name: str, image: NDArray[np.uint8], step: int) -> None:
        """Adds a picture (height, width, 3) to a series, from which users select by step."""
        # A separate section; otherwise TensorBoard shows pictures among the curves.
        tag = f"{self.section}_pictures/{name}"
        self._writers["validation"].add_image(tag, image, step, dataformats="HWC")

    def add_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Writes the settings of a run at its first start; None is left out."""
        if self.after > 0:
            return
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        plain = {
            name: value if isinstance(value, bool | int | float) else str(value)
            for name, value in values.items()
            if value is not None
        }
        self.logger.log_hyperparams(plain)
        # Written without a step, because a resumed run hides entries of later steps. Lightning's
        # method also requires metrics; TensorBoard reads the metrics from the curves.
        self.logger.experiment.file_writer.add_summary(hparams_pb(plain))

    def add_latent_space(
        self,
        latent: NDArray[np.float32],
        label: NDArray[np.int64],
        images: NDArray[np.uint8],
        step: int,
    ) -> None:
        """Adds latent points (N, dimensions) for TensorBoard's projector; 1,000 points take 0.1 s.

        Each point is shown as its image (N, height, width).
        """
        import torch

        self._writers["validation"].add_embedding(
            torch.from_numpy(latent),
            [str(number) for number in label],
            torch.from_numpy(images).unsqueeze(1).float() / 255,
            step,
            tag=f"{self.section} latent space",
        )

    def flush(self) -> None:
        """Flushes all files, because a resumed run does not write their content again."""
        for writer in (self.logger.experiment, *self._writers.values()):
            writer.flush()

    def __deepcopy__(self, memo: object) -> "TensorBoard":
        """Returns the object itself: NeMo copies callbacks, and open files cannot be copied."""
        return self


class RunLogger(TensorBoardLogger):
    def __init__(self, folder: Path, section: str, resumed_step: int = 0) -> None:
        super().__init__(folder, name="", version="tensorboard", default_hp_metric=False, purge_step=resumed_step + 1)
        self.board = TensorBoard(self, section, resumed_step)

    def add_hyperparameters(self, values): self.board.add_hyperparameters(values)
    def log_metrics(self, metrics, step=None):
        self.board.add_values("train", {k.removeprefix("train_"): v for k, v in metrics.items() if not k.startswith("val_")}, step)
        self.board.add_values("validation", {k.removeprefix("val_"): v for k, v in metrics.items() if k.startswith("val_")}, step)
    def save(self):
        super().save(); self.board.flush()
    def __deepcopy__(self, memo): return self
