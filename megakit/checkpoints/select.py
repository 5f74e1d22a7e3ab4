"""Chooses among a run's checkpoints, and cleans up after an interrupted run."""

import contextlib
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megakit.checkpoints.manifest import (
    Manifest,
    OtherFormatError,
    list_checkpoints,
    read_manifest,
    verify,
)
from megakit.checkpoints.model_settings import read_model_settings
from megakit.errors import UserError
from megakit.runtime.atomic_files import set_aside


def best_of(manifests: Mapping[Path, Manifest], by: str) -> Path | None:
    """Returns the checkpoint that the next stage uses, or None if there is none.

    It has the best value of `by`, a validated column of metrics.csv; of two equal values, the older
    checkpoint counts. NaN is no value. If `by` is `last`, or the column has no values, it is the
    last checkpoint.

    Args:
        manifests: The manifests of the checkpoints, by folder, oldest first.
        by: The column, or `last`.
    """
    best: tuple[Path, float] | None = None
    for path, manifest in manifests.items():
        value = manifest.validated(by)
        if value is None or math.isnan(value):
            continue
        sign = 1 if manifest.higher_is_better else -1
        if best is None or sign * value > sign * best[1]:
            best = path, value
    return best[0] if best else next(reversed(list(manifests)), None)


def readable_checkpoints(folder: Path) -> dict[Path, Manifest]:
    """Returns the checkpoints in a folder whose manifests can be read, oldest first."""
    found = {}
    for checkpoint in list_checkpoints(folder):
        with contextlib.suppress(UserError):
            found[checkpoint] = read_manifest(checkpoint)
    return found


def own_checkpoints(folder: Path, stage: str, run: Mapping[str, Any]) -> dict[Path, Manifest]:
    """Returns the readable checkpoints of a run in a folder, oldest first, with their manifests."""
    found = readable_checkpoints(folder).items()
    return {path: manifest for path, manifest in found if manifest.belongs_to(stage, run)}


def keep_own_checkpoints(
    folder: Path, stage: str, run: Mapping[str, Any], report: Callable[[str], None]
) -> tuple[Path, Manifest] | tuple[None, None]:
    """Renames each checkpoint that the run cannot use; returns the newest that it can use.

    Renamed are damaged checkpoints and those of another stage, run or step. `report` receives one
    line for the user about each of them. The returned checkpoint is verified by hash, because
    the run uses it; older checkpoints are verified by name and size only.

    Raises:
        UserError: A checkpoint may be undamaged: another version of this program wrote it, or the
            system cannot read it.
    """
    newest = None
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            manifest = verify(checkpoint, by_hash=newest is None)
            read_model_settings(checkpoint)
            if manifest.belongs_to(stage, run):
                newest = newest or (checkpoint, manifest)
                continue
            reason, problem = "foreign", f"{checkpoint}: belongs to another run."
        except UserError as error:
            if isinstance(error, OtherFormatError) or isinstance(error.__cause__, OSError):
                raise
            reason, problem = "damaged", str(error).removesuffix(" Use another checkpoint.")
        renamed = set_aside(checkpoint, f"{reason}-{checkpoint.name}")
        report(f"{problem} The checkpoint was renamed to {renamed.name}.")
    return newest or (None, None)


def remove_leftovers(folder: Path) -> None:
    """Removes the remains of interrupted saves and removals from a folder of checkpoints."""
    for path in folder.glob(".*step=*"):
        shutil.rmtree(path, ignore_errors=True)


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint.

    The checkpoint is renamed first, so an interrupted removal leaves nothing that looks complete.
    """
    with contextlib.suppress(OSError):
        removed = checkpoint.rename(checkpoint.with_name(f".removing-{checkpoint.name}"))
        shutil.rmtree(removed, ignore_errors=True)
