"""Chooses among a run's checkpoints, and cleans up after an interrupted run."""

import contextlib
import errno
import fcntl
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from megakit.checkpoints.context import read_model_settings
from megakit.checkpoints.folders import MANIFEST, list_checkpoints
from megakit.checkpoints.manifest import Manifest, OtherFormatError, read_manifest, same_run, verify
from megakit.errors import UserError

#: Errors of `flock` on a file system without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
#: Errors of a file system or process that may not occur at the next start.
TEMPORARY_ERRORS = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR),
)


def best_checkpoint(folder: Path, by: str = "val_loss") -> Path | None:
    """Returns the checkpoint that the next stage uses, or None if there is none.

    Args:
        folder: The folder of the checkpoints.
        by: A validated column of metrics.csv, or `last`. A column selects the checkpoint with the
            best value; of two equal values, the older checkpoint. `last` selects the last
            checkpoint, and so does a column without values.

    Raises:
        UserError: A manifest is damaged.
    """
    return best_of({path: read_manifest(path) for path in list_checkpoints(folder)}, by)


def best_of(manifests: Mapping[Path, Manifest], by: str) -> Path | None:
    """Chooses like `best_checkpoint`, from manifests by folder, oldest first."""
    best: tuple[Path, float] | None = None
    for path, manifest in manifests.items():
        value = manifest.validated(by)
        if value is not None and (
            best is None or is_better(value, best[1], manifest.higher_is_better)
        ):
            best = path, value
    return best[0] if best else next(reversed(list(manifests)), None)


def is_better(value: float, best: float, higher_is_better: bool) -> bool:
    """Returns whether a validated value is better than the best so far; NaN is the worst value."""
    if math.isnan(value) or math.isnan(best):
        return not math.isnan(value)
    return value > best if higher_is_better else value < best


def own_checkpoints(folder: Path, stage: str, run: Mapping[str, Any]) -> dict[Path, Manifest]:
    """Returns the readable checkpoints of a run in a folder, oldest first, with their manifests."""
    own = {}
    for checkpoint in list_checkpoints(folder):
        with contextlib.suppress(UserError):
            manifest = read_manifest(checkpoint)
            if manifest.stage == stage and same_run(manifest.run, run):
                own[checkpoint] = manifest
    return own


def keep_own_checkpoints(
    folder: Path, stage: str, run: Mapping[str, Any], report: Callable[[str], None]
) -> dict[Path, Manifest]:
    """Renames each checkpoint that the run cannot use; returns the usable checkpoints.

    These are checkpoints of another stage or run, damaged checkpoints, checkpoints whose step
    differs from the folder's name, and checkpoints with unsafe settings.

    Args:
        folder: The folder of the checkpoints.
        stage: The run's stage.
        run: The identity of the run, as in its manifests.
        report: Receives one line for the user about each renamed checkpoint.

    Returns:
        Verified checkpoints with their manifests, oldest first.

    Raises:
        OtherFormatError: Another version of this program wrote a checkpoint.
        UserError: A checkpoint cannot be read, perhaps because of a temporary error.
    """
    kept = {}
    for checkpoint in list_checkpoints(folder):
        try:
            manifest = verify(checkpoint)
            read_model_settings(checkpoint)
        except OtherFormatError:
            raise  # another version of this program can use the checkpoint
        except UserError as error:
            cause = error.__cause__
            is_temporary = isinstance(cause, OSError) and cause.errno in TEMPORARY_ERRORS
            if is_temporary or isinstance(cause, MemoryError):
                raise  # the checkpoint may be undamaged
            aside = set_aside(checkpoint, "damaged")
            problem = str(error).removesuffix(" Use another checkpoint.")  # the run does so
            report(f"{problem} The checkpoint was renamed to {aside.name}.")
            continue
        if manifest.stage == stage and same_run(manifest.run, run):
            kept[checkpoint] = manifest
        else:
            aside = set_aside(checkpoint, "foreign")
            report(f"{checkpoint}: belongs to another run, and was renamed to {aside.name}.")
    return kept


def set_aside(checkpoint: Path, reason: str) -> Path:
    """Renames a checkpoint to `REASON-NAME`, which no program finds; returns the new path."""
    aside = checkpoint.with_name(f"{reason}-{checkpoint.name}")
    number = 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"{reason}-{checkpoint.name}.{number}")
    return checkpoint.rename(aside)


def remove_leftovers(folder: Path) -> None:
    """Removes the remains of interrupted saves and removals from a folder of checkpoints."""
    for path in folder.glob(".*step=*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def lock_checkpoint(checkpoint: Path) -> TextIO:
    """Locks a checkpoint, so that its run does not remove it until the returned file is closed.

    Raises:
        FileNotFoundError: The checkpoint is already removed.
    """
    file = (checkpoint / MANIFEST).open()
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    # A removal starts with a rename, which may have happened before the lock.
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(file.fileno()), (checkpoint / MANIFEST).stat()):
            return file
    file.close()
    raise FileNotFoundError(f"{checkpoint} was removed")


def remove(checkpoint: Path) -> bool:
    """Removes a checkpoint unless another program locks it; returns whether it was removed.

    The checkpoint is renamed first, so an interrupted removal leaves nothing that looks complete.
    Files that cannot be removed stay under the new name, which no program reads.
    """
    try:
        with (checkpoint / MANIFEST).open("r+") as manifest:  # NFS locks only files open to write
            try:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    return False
            removed = checkpoint.rename(checkpoint.with_name(f".removing-{checkpoint.name}"))
    except OSError:
        return False
    shutil.rmtree(removed, ignore_errors=True)
    return True
