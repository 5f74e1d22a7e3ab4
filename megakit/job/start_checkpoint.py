"""Finds the checkpoint of the previous stage that a stage starts from."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

from megakit.checkpoints.manifest import IMPORTED, Manifest, read_manifest, verify
from megakit.checkpoints.select import lock_checkpoint
from megakit.errors import UserError
from megakit.job.runs import RunDirectory, Stage


class StartCheckpoint(NamedTuple):
    """The verified checkpoint that a stage starts from.

    Attributes:
        path: The checkpoint.
        manifest: Its manifest.
        file: While this file is open, a running job of the previous stage does not remove the
            checkpoint.
    """

    path: Path
    manifest: Manifest
    file: TextIO


def find_start(
    stage: Stage, named: str | None, output_dir: Path, say: Callable[[str], object]
) -> StartCheckpoint | None:
    """Finds the checkpoint that a stage starts from, and protects it from removal.

    Args:
        stage: The stage that starts.
        named: The user's `--checkpoint`, or a run directory, whose best checkpoint is meant;
            `none` for fresh weights.
        output_dir: The folder with the run of the previous stage.
        say: Prints one line for the user.

    Returns:
        The checkpoint, or None for fresh weights.

    Raises:
        UserError: The checkpoint is missing, damaged, unfinished or of another stage.
    """
    before = stage.before
    if before is None or named == "none":
        return None
    directory = RunDirectory(Path(named) if named else output_dir / before.name)
    if named and not directory.checkpoints.is_dir():
        start = _open_checkpoint(directory.path)
    else:
        try:
            start = _open_checkpoint(_best(directory, before))
        except UserError:  # the running job of the previous stage may have removed this one
            start = _open_checkpoint(_best(directory, before))
        newest = directory.newest_of(before.name, start.manifest.run)
        # Without max_steps in its identity, a run can be continued after any number of steps.
        if newest is not None and not newest.ends(newest.run.get("max_steps", newest.step)):
            say(f"{directory.path} has not ended; its best checkpoint so far is used.")
    manifest = start.manifest
    if manifest.stage not in (before.name, IMPORTED):
        start.file.close()
        raise UserError(
            f"{start.path}: stage {manifest.stage} saved this {manifest.model}, but {stage.script} "
            f"starts from a checkpoint of stage {before.name}. Run {before.script}, or name one of "
            "its checkpoints with --checkpoint."
        )
    return start


def _best(directory: RunDirectory, stage: Stage) -> Path:
    if (best := directory.best_checkpoint()) is not None:
        return best
    raise UserError(
        f"{directory.checkpoints}: no checkpoint to start from. Run {stage.script} with the same "
        "--output-dir first, or name one with --checkpoint."
    )


def _open_checkpoint(checkpoint: Path) -> StartCheckpoint:
    read_manifest(checkpoint)  # raises a clear error for a folder that is not a checkpoint
    try:
        file = lock_checkpoint(checkpoint)
    except OSError as error:
        raise UserError(f"{checkpoint}: {error}. Use another checkpoint.") from error
    try:
        return StartCheckpoint(checkpoint, verify(checkpoint), file)
    except UserError:
        file.close()
        raise
