"""Keeps what a model predicts, and joins the predictions of all ranks, ordered by index."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray

from megakit.errors import UserError
from megakit.training.gathering import gather_from_ranks, has_outputs, on_host, real_samples

#: Values of samples by name: output, idx, and optionally label and latent; one row per sample.
Rows = dict[str, NDArray[Any]]
#: Memory that predictions need, as a multiple of their size. Rank 0 holds those of each rank,
#: joined and ordered, and the probabilities in float64; 3 million samples of ten classes took 4.4
#: times.
NUM_COPIES = 5


@dataclass(frozen=True)
class Outputs:
    """Holds a model's outputs for all N samples, ordered by index.

    Attributes:
        idx: The index of each sample, int64 (N,).
        output: The outputs, (N, ...); floating point outputs are float32.
        label: The label of each sample, (N,), int64 for a class; None if the model returns none.
        latent: The latent points, float32 (N, dimensions); None if the model returns none.
    """

    idx: NDArray[np.int64]
    output: NDArray[Any]
    label: NDArray[Any] | None = None
    latent: NDArray[np.float32] | None = None


class OutputsOfRanks:
    """Collects outputs on the ranks that have them, in memory; joins them on rank 0.

    Args:
        folder: A folder that all ranks share, for a file of each rank; its parent exists. The
            caller removes it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._batches: list[Rows] = []

    def add(self, outputs: Any, num_batches: int) -> None:
        """Keeps a batch's outputs, if this rank has outputs that no other rank has.

        Args:
            outputs: A dict of tensors with one row for each sample: `output` (B, ...), `idx` (B,),
                the batch's `loss_mask`, (B,) or (B, S), and optionally `label` (B,) and `latent`
                (B, dimensions). All batches have rows of the same shape. If all values of a
                sample's `loss_mask` are 0, the sample is padding.
            num_batches: Batches of all ranks together.

        Raises:
            UserError: The outputs are something else, or memory is too small for all.
        """
        if isinstance(outputs, dict):  # else Lightning would copy each tensor, and wait for each
            outputs.update(on_host(outputs))
        if has_outputs():
            self._batches.append(_rows_of(outputs))
            if len(self._batches) == 1:
                _check_memory(self._batches[0], num_batches)

    def join(self) -> Outputs | None:
        """Returns the outputs of all ranks on rank 0, None on other ranks; all ranks call it."""
        own, rank = None, torch.distributed.get_rank()
        if self._batches:
            own = self.folder / f"rank-{rank}.npz"
            self.folder.mkdir(exist_ok=True)
            np.savez(own, **_joined(self._batches))
            self._batches = []
        paths = gather_from_ranks(own)
        if rank != 0:
            return None
        rows = _joined([np.load(path) for path in paths if path])
        order = np.argsort(rows["idx"])
        return Outputs(**{name: column[order] for name, column in rows.items()})


def _rows_of(outputs: Any) -> Rows:
    """Converts the outputs of a batch to float32 and integers, without the padding.

    Raises:
        UserError: An entry is missing.
    """
    if not isinstance(outputs, dict) or not {"idx", "output", "loss_mask"} <= outputs.keys():
        raise UserError(
            "predict_step has to return a dict of tensors with one row for each sample: `output` "
            "(B, ...), `idx` (B,), `loss_mask` (B, ...) from the batch, and optionally `label` "
            "(B,) and `latent` (B, dimensions)."
        )
    real, rows = real_samples(outputs), {}
    for name in ("idx", "output", "label", "latent"):
        if (tensor := outputs.get(name)) is not None:
            rows[name] = (tensor.float() if tensor.is_floating_point() else tensor)[real].numpy()
    return rows


def _check_memory(batch: Rows, num_batches: int) -> None:
    """Checks that this machine could hold all predictions, by the size of a batch.

    Raises:
        UserError: They would not fit.
    """
    needed = NUM_COPIES * num_batches * sum(column.nbytes for column in batch.values())
    available = psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"The predictions need about {needed / 1e9:.1f} GB of memory, and this machine has "
            f"{available / 1e9:.1f} GB available. Predict fewer samples, or return smaller outputs "
            "from predict_step."
        )


def _joined(parts: Sequence[Mapping[str, NDArray[Any]]]) -> Rows:
    """Concatenates the rows of all parts."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
