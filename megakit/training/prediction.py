"""Predicts with a trained model: keeps the outputs in memory, or writes them to disk."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor

from megakit.errors import UserError
from megakit.runtime.patching import existing
from megakit.training.sorted_rows import RowFile, Rows, SortedRun, merge
from megakit.training.validation import gather_from_ranks, has_outputs, real_samples

#: The entries of an output of `predict_step` that are kept.
COLUMNS = ("idx", "label", "output", "latent")


@dataclass(frozen=True)
class Outputs:
    """Holds a model's outputs for N samples.

    Attributes:
        output: The outputs, float32 (N, ...).
        idx: The index of each sample, int64 (N,).
        label: The label of each sample, int64 (N,).
        latent: The latent points, float32 (N, dimensions); None if the model returns none.
    """

    output: np.ndarray
    idx: np.ndarray
    label: np.ndarray
    latent: np.ndarray | None = None

    @classmethod
    def from_rows(cls, rows: Rows) -> "Outputs":
        """Returns the columns of rows."""
        return cls(**{name: rows[name] for name in rows.dtype.names or ()})

    def check_finite(self, source: str | None) -> None:
        """Refuses NaN and infinite outputs, which finite but too large weights can cause.

        Raises:
            UserError: An output is NaN or infinite.
        """
        values = [self.output] if self.latent is None else [self.output, self.latent]
        if not all(np.isfinite(value).all() for value in values):
            raise UserError(
                f"{source}: the model's outputs are NaN or infinite. Its weights are damaged or "
                "too large. Use another checkpoint."
            )


@dataclass(frozen=True)
class StoredOutputs:
    """Describes a model's outputs on disk, and reads them in the order of the samples' indices.

    Attributes:
        runs: The sorted runs of all ranks.
    """

    runs: list[SortedRun]

    def __len__(self) -> int:
        """Returns the number of samples."""
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[Outputs]:
        """Yields the outputs in blocks, ordered by index.

        Raises:
            RuntimeError: Two samples have the same index.
        """
        last = np.iinfo(np.int64).min
        for rows in merge(self.runs):
            idx = np.append(last, rows["idx"])
            if (idx[1:] == idx[:-1]).any():
                raise RuntimeError("predictions do not cover every sample exactly once")
            last = idx[-1]
            yield Outputs.from_rows(rows)


def predict(
    *, model: pl.LightningModule, data: pl.LightningDataModule, trainer: pl.Trainer
) -> Outputs | None:
    """Runs a model on the data module's prediction set, each sample exactly once.

    The outputs of all samples have to fit into memory; `predict_to_disk` has no such limit.

    Args:
        model: A Lightning module. Its `predict_step` returns a dict with `output`, `idx`, `label`,
            `loss_mask` and optionally `latent`.
        data: The Lightning data module.
        trainer: The `nemo.lightning.Trainer`.

    Returns:
        The outputs of all ranks on rank 0, in no particular order; None on other ranks.
    """
    blocks: list[Rows] = []
    _predict(model, data, trainer, blocks.append)
    of_ranks = gather_from_ranks(blocks, trainer)
    if not trainer.is_global_zero:
        return None
    return Outputs.from_rows(np.concatenate([rows for blocks in of_ranks for rows in blocks]))


def predict_to_disk(
    *,
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    folder: Path,
) -> StoredOutputs | None:
    """Runs a model like `predict`, and writes the outputs of each rank to a file in a folder.

    Memory does not grow with the number of samples.

    Args:
        model: See `predict`.
        data: The Lightning data module.
        trainer: The `nemo.lightning.Trainer`.
        folder: An empty or new folder that all ranks share; its parent exists. The caller removes
            the folder after reading.

    Returns:
        The outputs of all ranks on rank 0, ordered by index; None on other ranks.
    """
    file = RowFile(folder / f"rank-{trainer.global_rank}")
    _predict(model, data, trainer, file.append)
    of_ranks = gather_from_ranks(file.close(), trainer)
    if not trainer.is_global_zero:
        return None
    return StoredOutputs([run for runs in of_ranks for run in runs])


def _predict(
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    receive: Callable[[Rows], None],
) -> None:
    """Runs a model, and passes this rank's outputs to a function after each batch."""
    callback, callbacks = _OnBatch(receive), existing(trainer, "callbacks")
    callbacks.append(callback)
    try:
        trainer.predict(model, datamodule=data)
    finally:
        callbacks.remove(callback)


class _OnBatch(pl.Callback):
    """Passes the outputs of each batch to a function, and discards Lightning's copy."""

    def __init__(self, receive: Callable[[Rows], None]) -> None:
        self._receive = receive

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Passes on a batch's outputs, if this rank has outputs that no other rank has."""
        # Lightning 2.4 has an error in `return_predictions=False` with NeMo's data loading.
        trainer.predict_loop.predictions.clear()
        if has_outputs():
            self._receive(_as_rows(outputs))


def _as_rows(outputs: Mapping[str, Tensor]) -> Rows:
    """Converts the outputs of a batch to rows, float32 and integers, without the padding."""
    tensors = {name: outputs[name] for name in COLUMNS if name in outputs}
    columns = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
        for name, tensor in tensors.items()
    }
    fields = [(name, column.dtype, column.shape[1:]) for name, column in columns.items()]
    rows = np.empty(len(columns["idx"]), fields)
    for name, column in columns.items():
        rows[name] = column
    real: Rows = rows[real_samples(outputs).cpu().numpy()]
    return real
