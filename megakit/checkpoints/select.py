"""Choosing among a run's checkpoints, and cleaning up after a run that was cut short."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from megakit.checkpoints.layout import list_checkpoints
from megakit.checkpoints.manifest import Manifest, read_manifest, verify
from megakit.errors import UserError

BestBy = Literal["val_loss", "last"]


def best_checkpoint(folder: Path, by: BestBy = "val_loss") -> Path | None:
    """The checkpoint that the next stage uses, or None if there is none.

    Args:
        folder: Of checkpoints.
        by: `val_loss`: the lowest, of two equal ones the older; where none was validated, the
            last. `last`: the last.

    Raises:
        UserError: A manifest is damaged.
    """
    checkpoints = list_checkpoints(folder)
    losses = {path: read_manifest(path).val_loss for path in checkpoints}
    validated = {path: loss for path, loss in losses.items() if loss is not None}
    if by == "val_loss" and validated:
        return min(validated, key=lambda path: (math.isnan(validated[path]), validated[path]))
    return checkpoints[-1] if checkpoints else None


def newest_intact_checkpoint(
    folder: Path, report: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    """The checkpoint to go on from; damaged newer ones are set aside by name.

    Args:
        folder: Of checkpoints.
        report: Takes one line for the user about each that is set aside.
    """
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            return checkpoint, verify(checkpoint)
        except UserError as error:
            aside = set_aside(checkpoint)
            report(f"{error} It is now {aside.name}; going on from the one before.")
    return None


def set_aside(checkpoint: Path) -> Path:
    """Gives a damaged checkpoint a name that nothing looks for; returns it."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    number = 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}.{number}")
    return checkpoint.rename(aside)


def remove_leftovers(folder: Path) -> None:
    """Removes what a save or a removal that was cut short has left in a folder of checkpoints."""
    for path in folder.glob(".*"):
        if path.is_dir():
            shutil.rmtree(path)
