"""A run as TensorBoard shows it: curves, pictures, a latent space to turn, hyper-parameters.

TensorBoard draws the curves of one name that lie in several folders on one chart. So what training
and validation measure goes to `train` and `validation` below the run's folder, under one name.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from numpy.typing import NDArray


class TensorBoard:
    """Writes one run's folder, for the one process that writes.

    Args:
        logger: Lightning's, which names the folder, and writes hyper-parameters there.
        section: Under what TensorBoard puts together whatever belongs to this run.
        after: The step that the run goes on from: what was written of later ones is hidden.
    """

    def __init__(self, logger: TensorBoardLogger, section: str, after: int = 0) -> None:
        self.logger = logger
        self.section = section
        self.after = after

    @cached_property
    def _writers(self) -> dict[str, Any]:
        from torch.utils.tensorboard import SummaryWriter

        return {
            part: SummaryWriter(Path(self.logger.log_dir, part), purge_step=self.after + 1)
            for part in ("train", "validation")
        }

    def add_values(self, part: str, values: Mapping[str, float | None], step: int) -> None:
        """Adds a point to each of some curves.

        Args:
            part: `train` or `validation`.
            values: By name; None is left out.
            step: Where on the curves.
        """
        for name, value in values.items():
            if value is not None:
                self._writers[part].add_scalar(f"{self.section}/{name}", value, step)

    def add_image(self, name: str, image: NDArray[np.uint8], step: int) -> None:
        """Adds a picture (height, width, 3), one of a sequence that can be gone through."""
        # In a group of their own, as they would stand among the curves otherwise.
        tag = f"{self.section}_pictures/{name}"
        self._writers["validation"].add_image(tag, image, step, dataformats="HWC")

    def add_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Notes what a run was asked for, once, at its start; None is left out."""
        if self.after > 0:
            return
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        plain = {
            name: value if isinstance(value, bool | int | float) else str(value)
            for name, value in values.items()
            if value is not None
        }
        self.logger.log_hyperparams(plain)
        # With no step: a resumption hides what belongs to one. Lightning's own method would want
        # metrics with it; TensorBoard takes those from the curves.
        self.logger.experiment.file_writer.add_summary(hparams_pb(plain))

    def add_latent_space(
        self,
        latent: NDArray[np.float32],
        label: NDArray[np.int64],
        images: NDArray[np.uint8],
        step: int,
    ) -> None:
        """Shows where a model places samples, for TensorBoard's projector; 1,000 take 0.1 s.

        Args:
            latent: (N, dimensions).
            label: (N,).
            images: (N, height, width), drawn at their places.
            step: When that is.
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
        """Hands everything to the system: a resumption takes it as written."""
        for writer in (self.logger.experiment, *self._writers.values()):
            writer.flush()

    def __deepcopy__(self, memo: object) -> "TensorBoard":
        """NeMo copies a trainer's callbacks in order to record them; open files cannot be."""
        return self
