"""Manages run directories, the identities of runs, and the checkpoints that runs start from."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from megakit.checkpoints import Manifest, read_manifest, verify
from megakit.checkpoints.manifest import IMPORTED, list_checkpoints, same_run, step_of
from megakit.checkpoints.select import (
    best_of,
    keep_own_checkpoints,
    lock_checkpoint,
    own_checkpoints,
    remove_leftovers,
)
from megakit.errors import UserError
from megakit.job.stage import Stage
from megakit.reporting.files import write_json
from megakit.runtime.foreign_files import JSON_BYTES, read_regular_file, reading

RUN_FILE = "run.json"
SUMMARY = "summary.json"
#: Entry of run.json with the paths that the run used. It is no part of the run's identity.
PLACES = "places"
#: Attempts to choose the best checkpoint while its run may remove the chosen checkpoint.
ATTEMPTS = 5


@dataclass(frozen=True)
class RunDirectory:
    """The folder of one stage's run below the output directory, and the files in this folder."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        """The file that a run writes when training has ended."""
        return self.path / SUMMARY

    @property
    def log(self) -> Path:
        """The file for the frameworks' output."""
        return self.path / "log.txt"

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, by its name; None if there is none."""
        newest = list_checkpoints(self.checkpoints)[-1:]
        return step_of(newest[0]) if newest else None

    def identity(self) -> dict[str, Any] | None:
        """Returns the identity of the run in this directory, or None if there is no run.

        The checkpoints decide: run.json counts only if there is no readable checkpoint, or if one
        readable checkpoint is of the same run.

        Raises:
            UserError: run.json is damaged, and there is no readable checkpoint.
        """
        in_checkpoints = []
        for checkpoint in reversed(list_checkpoints(self.checkpoints)):
            with contextlib.suppress(UserError):
                in_checkpoints.append(read_manifest(checkpoint).run)
        try:
            in_file = self._identity_in_file()
        except UserError:
            if not in_checkpoints:
                raise
            return in_checkpoints[0]
        if in_checkpoints and not any(same_run(in_file or {}, run) for run in in_checkpoints):
            return in_checkpoints[0]
        return in_file

    def newest_of(self, stage: str, identity: dict[str, Any]) -> Manifest | None:
        """Returns the manifest of a run's newest readable checkpoint, or None if there is none."""
        own = own_checkpoints(self.checkpoints, stage, identity)
        return next(reversed(own.values()), None)

    def _identity_in_file(self) -> dict[str, Any] | None:
        path = self.path / RUN_FILE
        if not path.exists():
            return None
        with reading(path, "Use --fresh, or another --output-dir."):
            content = json.loads(read_regular_file(path, JSON_BYTES))
            if not isinstance(content, dict):
                raise TypeError("not a JSON object")
        content.pop(PLACES, None)
        return content

    def write_identity(
        self, identity: dict[str, Any], places: Mapping[str, str] | None = None
    ) -> None:
        """Writes the identity of a run to run.json, with the paths that the run uses."""
        content = identity | ({PLACES: dict(places)} if places else {})
        path = self.path / RUN_FILE
        with contextlib.suppress(UserError), reading(path, ""):
            if json.loads(read_regular_file(path, JSON_BYTES)) == content:
                return
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(path, content)

    def withdraw(self, old_run: str | None = None) -> bool:
        """Undoes the start of a run that was refused before its first checkpoint.

        Another run can then use this directory.

        Args:
            old_run: The run that was renamed for the refused run; it gets its place back.

        Returns:
            Whether the old run has its place back.
        """
        if self.newest_step is not None:
            return False
        (self.path / RUN_FILE).unlink(missing_ok=True)
        if old_run is None:
            return False
        shutil.rmtree(self.path)
        Path(old_run).rename(self.path)
        return True

    def best_checkpoint(self) -> Path | None:
        """Returns the checkpoint that the next stage uses, or None if there is no checkpoint.

        Raises:
            UserError: A checkpoint is damaged, or belongs to another run.
        """
        manifests = {path: read_manifest(path) for path in list_checkpoints(self.checkpoints)}
        identity = self.identity()
        for path, manifest in manifests.items():
            if not same_run(manifest.run, identity or {}):
                raise UserError(
                    f"{path}: belongs to another run than {self.path}. Move it away, or name the "
                    "checkpoint to use with --checkpoint."
                )
        return best_of(manifests, (identity or {}).get("best_by", "val_loss"))

    def has_ended(self, max_steps: object) -> bool:
        """Returns whether the newest checkpoint is the last one of a run of `max_steps` steps."""
        newest = list_checkpoints(self.checkpoints)[-1:]
        with contextlib.suppress(UserError):  # a damaged checkpoint, or removed by its run
            return bool(newest) and read_manifest(newest[0]).ends(max_steps)
        return False

    def rename(self) -> Path:
        """Appends the first free number to the name of this directory; returns its new path."""
        number = 1
        while (renamed := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return self.path.rename(renamed)


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
    stage: Stage, named: str | None, output_dir: Path, report: Callable[[str], None]
) -> StartCheckpoint | None:
    """Finds the checkpoint that a stage starts from, and protects it from removal.

    Args:
        stage: The stage that starts.
        named: The user's `--checkpoint`; `none` for fresh weights.
        output_dir: The folder with the run of the previous stage.
        report: Prints one line for the user.

    Returns:
        The checkpoint, or None for fresh weights.

    Raises:
        UserError: The checkpoint is missing, damaged, unfinished or of another model.
    """
    before = stage.before
    if before is None or named == "none":
        return None
    if named is not None:
        start = _verify_and_protect(Path(named))
    else:
        directory = RunDirectory(output_dir / before.name)
        start = _protect_best(directory, before)
        if not directory.has_ended(start.manifest.run.get("max_steps")):
            report(f"{directory.path} has not ended; its best checkpoint so far is used.")
    manifest = start.manifest
    if manifest.model != before.model or manifest.stage not in (before.name, IMPORTED):
        start.file.close()
        titles = {known.name: known.title for known in (stage, before)}
        titles[IMPORTED] = "imported weights"
        found = titles.get(manifest.stage, f"from stage {manifest.stage}")
        raise UserError(
            f"{start.path}: contains {found} ({manifest.model}); {stage.script} starts from "
            f"{before.title} ({before.model}), which {before.script} trains. "
            "Name another --checkpoint."
        )
    return start


def _protect_best(directory: RunDirectory, before: Stage) -> StartCheckpoint:
    """Chooses the best checkpoint; chooses again if a running job has just removed it."""
    for attempts_left in reversed(range(ATTEMPTS)):
        before_choosing = list_checkpoints(directory.checkpoints)
        try:
            if checkpoint := directory.best_checkpoint():
                return _verify_and_protect(checkpoint)
        except UserError:
            if not attempts_left or all(path.exists() for path in before_choosing):
                raise
    raise UserError(
        f"{directory.checkpoints}: no checkpoint to start from. "
        f"Run {before.script} with the same --output-dir first, or name one with "
        "--checkpoint."
    )


def _verify_and_protect(checkpoint: Path) -> StartCheckpoint:
    read_manifest(checkpoint)  # raises a clear error for a folder that is not a checkpoint
    try:
        file = lock_checkpoint(checkpoint)
    except OSError as error:
        raise UserError(f"{checkpoint}: {error}. Use another checkpoint.") from error
    try:
        return StartCheckpoint(checkpoint, verify(checkpoint), file)
    except BaseException:
        file.close()
        raise


def find_resumption(
    directory: RunDirectory,
    stage: str,
    identity: dict[str, Any],
    report: Callable[[str], None],
) -> tuple[Path, Manifest] | None:
    """Finds the checkpoint that a run resumes from, after removing leftovers of the last start.

    Args:
        directory: The run directory, which this process has locked.
        stage: Name of the run's stage.
        identity: Identity of the run.
        report: Prints one line for the user.
    """
    if not directory.checkpoints.is_dir():
        return None
    remove_leftovers(directory.checkpoints)
    kept = keep_own_checkpoints(directory.checkpoints, stage, identity, report)
    return next(reversed(kept.items()), None)


def check_writable(folder: Path) -> list[str]:
    """Returns why a folder, which may not exist yet, is not writable; no message if it is."""
    existing = folder.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
    except OSError as error:
        return [f"--output-dir {folder}: {error.strerror}. Name another folder."]
    if not existing.is_dir():
        return [f"--output-dir {folder}: {existing} is a file. Name a folder."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"--output-dir {folder}: {existing} cannot be written to. Name another folder."]
    return []
