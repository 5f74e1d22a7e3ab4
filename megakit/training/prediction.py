"""Stores a model's predictions in a file for each rank, and reads them ordered by index."""

import itertools
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megakit.errors import UserError
from megakit.training.validation import gather_from_ranks, has_outputs, on_host, real_samples

#: Size of a block of rows in bytes.
BLOCK_BYTES = 1 << 20
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
        label: The label of each sample, (N,), int64 for a class; None if the model returns none.
        latent: The latent points, float32 (N, dimensions); None if the model returns none.
    """

    output: NDArray[Any]
    idx: NDArray[np.int64]
    label: NDArray[Any] | None = None
    latent: NDArray[np.float32] | None = None


class StoredOutputs:
    """Reads stored outputs in blocks ordered by index; the order takes 8 bytes for each sample.

    Raises:
        RuntimeError: Two samples have the same index.
    """

    def __init__(self, paths: Sequence[Path], dtype: np.dtype[Any]) -> None:
        self._paths, self._dtype = paths, dtype
        self._num_rows = max(1, BLOCK_BYTES // dtype.itemsize)  # of a block
        sizes = [len(self._open(path)) for path in paths]
        self._ends = np.cumsum([0, *sizes])
        blocks = [
            self._open(path)["idx"][start : start + self._num_rows].copy()
            for path, size in zip(paths, sizes, strict=True)
            for start in range(0, size, self._num_rows)
        ]
        idx = np.concatenate(blocks)
        self._order = np.argsort(idx, kind="stable")
        idx.sort()
        if (idx[1:] == idx[:-1]).any():
            raise RuntimeError("predictions do not cover every sample exactly once")

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self._order)

    def __iter__(self) -> Iterator[Outputs]:
        """Yields the outputs of the next samples, about `BLOCK_BYTES` at a time."""
        for start in range(0, len(self), self._num_rows):
            order = self._order[start : start + self._num_rows]
            rows = np.empty(len(order), self._dtype)
            for path, (first, end) in zip(self._paths, itertools.pairwise(self._ends), strict=True):
                is_here = (order >= first) & (order < end)
                rows[is_here] = self._open(path)[order[is_here] - first]
            yield Outputs(**{name: rows[name] for name in rows.dtype.names or ()})

    def _open(self, path: Path) -> NDArray[np.void]:
        """Maps a file into memory. Each block has its own map, which ends with the block."""
        return np.memmap(path, self._dtype, mode="r")


class PredictionWriter(pl.Callback):
    """Stores what `predict_step` returns; memory does not grow with the number of samples.

    `outputs` returns what `trainer.predict(module, data)` has stored. `predict_step` returns a dict
    of tensors with one row for each sample: `output` (B, ...), `idx` (B,), the batch's `loss_mask`,
    (B,) or (B, S), and optionally `label` (B,) and `latent` (B, dimensions). All batches have rows
    of the same shape. If all values of a sample's `loss_mask` are 0, the sample is padding.

    Args:
        folder: A folder that all ranks share; its parent exists. The caller removes it.

    Attributes:
        seconds: Seconds of the last prediction.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, 0.0

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock."""
        self._trainer, self._began = trainer, time.perf_counter()
        self._file: IO[bytes] | None = None
        self._dtype: Any = None

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Stores a batch's outputs, if this rank has outputs that no other rank has.

        Raises:
            UserError: `predict_step` returned something else, or rows of another shape.
        """
        # Lightning 2.4 has an error in `return_predictions=False` with NeMo's data loading.
        trainer.predict_loop.predictions.clear()
        if isinstance(outputs, dict):  # else Lightning would copy each tensor, and wait for each
            outputs.update(on_host(outputs))
        if not has_outputs() or not len(rows := _as_rows(outputs)):
            return
        if self._file is None:
            self.folder.mkdir(exist_ok=True)
            self._file = (self.folder / f"rank-{trainer.global_rank}").open("wb")
            self._dtype = rows.dtype
        _check_equal(self._dtype, rows.dtype)
        self._file.write(rows.tobytes())

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Closes the file and stops the clock."""
        if self._file is not None:
            self._file.close()
        self.seconds = time.perf_counter() - self._began

    def on_exception(self, *args: Any) -> None:
        """Removes the folder: the outputs may have filled the disk."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def outputs(self) -> StoredOutputs | None:
        """Returns the outputs of all ranks on rank 0, None on other ranks; all ranks call it.

        Raises:
            RuntimeError: Two samples have the same index, or there are no samples.
            UserError: The ranks have rows of different types or shapes.
        """
        own = self._file and (Path(self._file.name), self._dtype)
        found = [each for each in gather_from_ranks(own, self._trainer) if each is not None]
        if not self._trainer.is_global_zero:
            return None
        if not found:
            raise RuntimeError("the prediction set has no samples")
        paths, dtypes = zip(*found, strict=True)
        _check_equal(*dtypes)
        return StoredOutputs(paths, dtypes[0])


def _as_rows(outputs: Any) -> NDArray[np.void]:
    """Converts the outputs of a batch to rows, float32 and integers, without the padding.

    Raises:
        UserError: An entry is missing, is no tensor, or has another number of rows than `idx`.
    """
    found = outputs if isinstance(outputs, Mapping) else {}
    needed = ("idx", "output", "loss_mask")
    if missing := [name for name in needed if not isinstance(found.get(name), Tensor)]:
        returned = ", ".join(map(str, found)) if found else type(outputs).__name__
        raise UserError(
            f"predict_step returned {returned} without a tensor for {', '.join(missing)}. {REMEDY}"
        )
    samples, columns = found["idx"].shape, {}
    for name in ("idx", "output", "label", "latent", "loss_mask"):
        if (tensor := found.get(name)) is None:
            continue
        if tensor.shape[:1] != samples:
            raise UserError(
                f"predict_step returned {name!r} of shape {tuple(tensor.shape)} for the "
                f"{samples[0]} samples of `idx`. {REMEDY} Transpose logits (S, B, V) to (B, S, V)."
            )
        if name != "loss_mask":
            columns[name] = (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
    fields = [(name, column.dtype, column.shape[1:]) for name, column in columns.items()]
    rows = np.empty(samples, fields)
    for name, column in columns.items():
        rows[name] = column
    kept: NDArray[np.void] = rows[real_samples(found).cpu().numpy()]
    return kept


def _check_equal(*dtypes: np.dtype[Any]) -> None:
    """Checks that all rows have the same columns, of the same shapes and types.

    Raises:
        UserError: They differ.
    """
    if len({*dtypes}) > 1:
        kinds = " and ".join(sorted({str(dtype) for dtype in dtypes}))
        raise UserError(
            f"predict_step returned rows of different types or shapes: {kinds}. Return the same "
            "entries for each batch, and pad sequences to one length."
        )
