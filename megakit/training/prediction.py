"""Predicts with a trained model: keeps the outputs in memory, or writes them to disk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megakit.errors import UserError
from megakit.runtime.patching import require_attribute
from megakit.training.sorted_rows import RowFile, Rows, SortedRun, merge
from megakit.training.validation import gather_from_ranks, has_outputs, real_samples

#: The entries of an output of `predict_step` that are kept. Every output has the first two.
COLUMNS = ("idx", "output", "label", "latent")

#: What an error about an output of `predict_step` ends with.
REMEDY = (
    "Return a dict of tensors with one row for each sample: `output` (B, ...), `idx` (B,), "
    "`loss_mask` (B, ...) from the batch, and optionally `label` (B,) and `latent` (B, dimensions)."
)


@dataclass(frozen=True)
class Outputs:
    """Holds a model's outputs for N samples.

    Attributes:
        output: The outputs, (N, ...); floating point outputs are float32.
        idx: The index of each sample, int64 (N,).
        label: The label of each sample, int64 (N,); None if the model returns none.
        latent: The latent points, float32 (N, dimensions); None if the model returns none.
    """

    output: NDArray[Any]
    idx: NDArray[np.int64]
    label: NDArray[np.int64] | None = None
    latent: NDArray[np.float32] | None = None

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
        model: A Lightning module. Its `predict_step` returns a dict of tensors with one row for
            each sample: `output` (B, ...), `idx` (B,), the batch's `loss_mask`, (B,) or (B, S),
            and optionally `label` (B,) and `latent` (B, dimensions). All batches have rows of the
            same shape. If all values of a sample's `loss_mask` are 0, the sample is padding.
        data: The Lightning data module.
        trainer: The `nemo.lightning.Trainer`.

    Returns:
        The outputs of all ranks on rank 0, in no particular order; None on other ranks.

    Raises:
        UserError: `predict_step` returns something else.
    """
    blocks: list[Rows] = []
    _predict(model, data, trainer, blocks.append)
    of_ranks = gather_from_ranks(blocks, trainer)
    if not trainer.is_global_zero:
        return None
    all_rows = [rows for blocks in of_ranks for rows in blocks]
    _check_equal([rows.dtype for rows in all_rows])
    return Outputs.from_rows(np.concatenate(all_rows))


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

    Raises:
        UserError: See `predict`.
    """
    file = RowFile(folder / f"rank-{trainer.global_rank}")
    _predict(model, data, trainer, file.append)
    of_ranks = gather_from_ranks(file.close(), trainer)
    if not trainer.is_global_zero:
        return None
    all_runs = [run for runs in of_ranks for run in runs]
    _check_equal([run.dtype for run in all_runs])
    return StoredOutputs(all_runs)


def _predict(
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    receive: Callable[[Rows], None],
) -> None:
    """Runs a model, and passes this rank's outputs to a function after each batch."""
    callback, callbacks = _OnBatch(receive), require_attribute(trainer, "callbacks")
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


def _as_rows(outputs: Any) -> Rows:
    """Converts the outputs of a batch to rows, float32 and integers, without the padding.

    Raises:
        UserError: See `_entries`.
    """
    tensors = _entries(outputs)
    real = real_samples(tensors).cpu().numpy()
    columns = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
        for name, tensor in tensors.items()
        if name in COLUMNS
    }
    fields = [(name, column.dtype, column.shape[1:]) for name, column in columns.items()]
    rows = np.empty(len(real), fields)
    for name, column in columns.items():
        rows[name] = column
    kept: Rows = rows[real]
    return kept


def _entries(outputs: Any) -> dict[str, Tensor]:
    """Returns the columns and the mask of what `predict_step` returned.

    Raises:
        UserError: An entry is missing, is no tensor, or has another number of rows than `idx`.
    """
    found = outputs if isinstance(outputs, Mapping) else {}
    needed = (*COLUMNS[:2], "loss_mask")
    if missing := [name for name in needed if not isinstance(found.get(name), Tensor)]:
        returned = ", ".join(map(str, found)) if found else type(outputs).__name__
        raise UserError(
            f"predict_step returned {returned} without a tensor for {', '.join(missing)}. {REMEDY}"
        )
    tensors = {name: found[name] for name in (*COLUMNS, "loss_mask") if found.get(name) is not None}
    samples = tensors["idx"].shape
    for name, tensor in tensors.items():
        if tensor.shape[:1] != samples:
            raise UserError(
                f"predict_step returned {name!r} of shape {tuple(tensor.shape)} for the "
                f"{samples[0]} samples of `idx`. {REMEDY} Transpose logits (S, B, V) to (B, S, V)."
            )
    return tensors


def _check_equal(dtypes: Sequence[np.dtype[Any]]) -> None:
    """Checks that all batches have the same columns, of the same shapes and types.

    Raises:
        UserError: They differ.
    """
    kinds = sorted({str(dtype) for dtype in dtypes})
    if len(kinds) > 1:
        raise UserError(
            f"predict_step returned rows of different types or shapes: {' and '.join(kinds)}. "
            "Return the same entries for each batch, and pad sequences to one length."
        )
