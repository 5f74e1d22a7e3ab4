"""Writes each checkpoint of a run completely or not at all; keeps the best and the last.

Another library writes the weights into a hidden folder. The store adds a manifest with the hash of
each file, and renames the complete folder.
"""

import re
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from megakit.checkpoints.manifest import (
    WEIGHTS,
    Files,
    Manifest,
    checkpoint_name,
    describe,
    list_files,
    write_manifest,
)
from megakit.checkpoints.select import best_of, own_checkpoints, remove
from megakit.runtime.atomic_files import publish


class CheckpointStore:
    """Saves and selects the checkpoints of one run. All ranks of a job have one, and rank 0 writes.

    Args:
        folder: The folder of the checkpoints.
        manifest: The content of each manifest, except step, validated values and files.
        best_by: How the best checkpoint is chosen: see `best_of`.
        copied: Files to copy into each checkpoint, if they exist.

    Attributes:
        last: The newest checkpoint, or "".
        best: The best checkpoint, or "".
        best_is_highest: Whether the best checkpoint has the highest value of `best_by`.
        seconds: Seconds spent saving, in all starts of the run.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        best_by: str = "val_loss",
        *,
        copied: Sequence[Path] = (),
    ) -> None:
        self.folder, self.manifest, self.best_by, self.copied = folder, manifest, best_by, copied
        self.last = self.best = ""
        self.best_is_highest = False
        self.seconds = 0.0

    def open(self, *, prune: bool = True) -> None:
        """Finds the checkpoints of earlier starts; removes those that a killed start left."""
        if rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        if own := self._find_own():
            last = next(reversed(own))
            self.last = str(last)
            if prune and rank() == 0:
                self._prune(last)

    def save(
        self,
        step: int,
        write: Callable[[Path], object],
        values: Mapping[str, float] | None = None,
        *,
        describe_model: Callable[[Path], None] = lambda folder: None,
        **fields: Any,
    ) -> Path:
        """Writes a checkpoint, and returns its folder. Every rank has to call this method.

        Args:
            step: Completed optimizer steps. If this step is saved already, nothing happens.
            write: Writes this rank's part into the subfolder `weights` of a given folder.
            values: The validated values after this step, by column of metrics.csv.
            describe_model: Adds further files to the given folder; called on rank 0.
            **fields: Further fields of the manifest.

        Raises:
            OSError: The checkpoint could not be written; earlier checkpoints are not changed.
        """
        started = time.perf_counter()
        final = self.folder / checkpoint_name(step)
        if str(final) != self.last:
            partial = self.folder / f".{final.name}"
            known = dict(values or {})
            fields |= {"step": step, "val_loss": known.pop("val_loss", None), "values": known}
            try:
                self._write(partial, final, write, describe_model, fields)
            except BaseException as error:
                if rank() == 0:
                    shutil.rmtree(partial, ignore_errors=True)
                reason = why_not_written(error)
                if reason is None:
                    raise
                raise OSError(f"cannot save {final}: {reason}") from error
            self.last = str(final)
            self._find_own()
        self.seconds += time.perf_counter() - started
        return final

    def _write(
        self,
        partial: Path,
        final: Path,
        write: Callable[[Path], object],
        describe_model: Callable[[Path], None],
        fields: Mapping[str, Any],
    ) -> None:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()  # an error if the run directory was removed
        barrier()
        write(partial)
        hashed = hash_weights(partial)
        if rank() == 0:
            describe_model(partial)
            for path in self.copied:
                if path.exists():
                    shutil.copyfile(path, partial / path.name)
            manifest = replace(
                self.manifest,
                higher_is_better=self.best_is_highest,
                files=list_files(partial, hashed) | hashed,
                **fields,
            )
            write_manifest(partial, manifest)
            publish(partial, final)
            self._prune(final)
        barrier()

    def _prune(self, last: Path) -> None:
        own = self._find_own()
        for checkpoint in own.keys() - {Path(self.best), last}:
            remove(checkpoint)

    def _find_own(self) -> dict[Path, Manifest]:
        """Returns the checkpoints of this run, oldest first; stores the path of the best one."""
        own = own_checkpoints(self.folder, self.manifest.stage, self.manifest.run)
        self.best = str(best_of(own, self.best_by) or "")
        return own


def rank() -> int:
    """Returns this process's rank in its job."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def barrier() -> None:
    """Waits until all ranks of the job have come here."""
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        uses_gpu = distributed.get_backend() == "nccl"
        distributed.barrier(device_ids=[torch.cuda.current_device()] if uses_gpu else None)


def hash_weights(checkpoint: Path) -> Files:
    """Hashes the weights that this rank wrote; returns the files that all ranks have hashed.

    Megatron and torch name them `__RANK_NUMBER.distcp`. A rank sees its own files at once on every
    shared file system, and mostly reads them from memory. Rank 0 hashes all files that remain, so
    every file is hashed, whatever its name.
    """
    found = (checkpoint / WEIGHTS).glob(f"__{rank()}_*")
    own = {f"{WEIGHTS}/{path.name}": describe(path) for path in found}
    parts = [own]
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        parts *= distributed.get_world_size()
        distributed.all_gather_object(parts, own)
    return {name: file for part in parts for name, file in part.items()}


def why_not_written(error: BaseException) -> str | None:
    """Returns the system's reason for a failed save; None if the program caused the error.

    The error of another rank, or of torch's archive writer, contains the reason as text only.
    """
    text = "".join(traceback.format_exception(error))
    if reason := re.search(r"\[Errno \d+\] ([^:\n]+)", text):
        return reason[1]
    if "inline_container" in text or "PytorchStreamWriter" in text:
        return "a file could not be written completely, as on a full disk"
    return None
