"""Manages run directories: their files, their locks, and the identities of their runs."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from megakit.checkpoints.manifest import Manifest, list_checkpoints, read_manifest, same_run
from megakit.checkpoints.select import best_of, own_checkpoints
from megakit.errors import RunDirectoryLostError, UserError, reading
from megakit.reporting.files import write_json

RUN_FILE = "run.json"
SUMMARY = "summary.json"
LOCK_FILE = ".lock"
#: Entry of run.json with the paths that the run used. It is no part of the run's identity.
PLACES = "places"


@dataclass(frozen=True)
class Stage:
    """One stage in a chain of scripts. Its script is called `model_NAME.py`.

    Attributes:
        name: Name of the stage, and of its run directory below the output directory.
        before: The stage whose best checkpoint this stage starts from; None: there is none.
    """

    name: str
    before: "Stage | None" = None

    @property
    def script(self) -> str:
        """The name of the stage's script."""
        return f"model_{self.name}.py"


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
            in_file = self._read()
        except UserError:
            if not in_checkpoints:
                raise
            return in_checkpoints[0]
        if in_file is not None:
            in_file.pop(PLACES, None)
        if in_checkpoints and not any(same_run(in_file or {}, run) for run in in_checkpoints):
            return in_checkpoints[0]
        return in_file

    def places(self) -> dict[str, str]:
        """Returns the absolute paths that the run used, by option; none if run.json is damaged."""
        with contextlib.suppress(UserError):
            found = (self._read() or {}).get(PLACES)
            if isinstance(found, dict):
                return {name: path for name, path in found.items() if isinstance(path, str)}
        return {}

    def _read(self) -> dict[str, Any] | None:
        path = self.path / RUN_FILE
        if not path.exists():
            return None
        with reading(path, "Use --fresh, or another --output-dir."):
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict):
                raise TypeError("not a JSON object")
            return content

    def write(self, identity: Mapping[str, Any], places: Mapping[str, str]) -> None:
        """Writes the identity of a run to run.json, with the paths that the run uses."""
        content = {**identity, **({PLACES: dict(places)} if places else {})}
        with contextlib.suppress(UserError):
            if self._read() == content:
                return
        write_json(self.path / RUN_FILE, content)

    def newest_of(self, stage: str, identity: Mapping[str, Any]) -> Manifest | None:
        """Returns the manifest of a run's newest readable checkpoint, or None if there is none."""
        return next(reversed(own_checkpoints(self.checkpoints, stage, identity).values()), None)

    def best_checkpoint(self) -> Path | None:
        """Returns the checkpoint that the next stage uses, or None if there is no checkpoint.

        Raises:
            UserError: A checkpoint is damaged, or belongs to another run.
        """
        manifests = {path: read_manifest(path) for path in list_checkpoints(self.checkpoints)}
        identity = self.identity() or {}
        for path, manifest in manifests.items():
            if not same_run(manifest.run, identity):
                raise UserError(
                    f"{path}: belongs to another run than {self.path}. Move it away, or name the "
                    "checkpoint to use with --checkpoint."
                )
        return best_of(manifests, identity.get("best_by", "val_loss"))

    def set_aside(self) -> Path:
        """Appends the first free number to the name of this directory; returns its new path."""
        number = 1
        while (renamed := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return self.path.rename(renamed)

    def withdraw(self, old_run: Path | None) -> bool:
        """Undoes the start of a run that was refused before its first checkpoint.

        Args:
            old_run: The run that was set aside for the refused run; it gets its place back.

        Returns:
            Whether the old run has its place back.
        """
        if list_checkpoints(self.checkpoints):
            return False
        (self.path / RUN_FILE).unlink(missing_ok=True)
        if old_run is None:
            return False
        shutil.rmtree(self.path)
        old_run.rename(self.path)
        return True


# --- The lock -------------------------------------------------------------------------------------


class RunLock(NamedTuple):
    """A lock on a run directory, which holds until `file` is closed or this process ends.

    Attributes:
        file: The open lock file.
        inode: Device and inode number of the lock file.
    """

    file: IO[str]
    inode: tuple[int, int]


def lock(folder: Path) -> RunLock:
    """Locks a run directory against other processes; creates the directory if necessary.

    The lock file is in the directory itself, so two paths to one directory share one lock.

    Raises:
        UserError: Another process uses the directory, or the file system has no locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be created or opened ({error.strerror}). Use another "
            "--output-dir."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with file:
            if not isinstance(error, BlockingIOError):
                raise UserError(
                    f"{folder / LOCK_FILE}: cannot be locked ({error.strerror}). "
                    "Use an --output-dir on a file system that supports locks."
                ) from error
            file.seek(0)
            holder = file.read().strip() or "another process"
        raise UserError(
            f"{folder} is in use by {holder}. Wait for it, end it, or use another --output-dir."
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    status = os.fstat(file.fileno())
    return RunLock(file, (status.st_dev, status.st_ino))


def check_still_ours(folder: Path, inode: tuple[int, int]) -> None:
    """Checks that a run directory is still the directory that was locked.

    Args:
        folder: The run directory.
        inode: Device and inode number of the lock file when it was locked.

    Raises:
        RunDirectoryLostError: The directory was removed, renamed or replaced.
    """
    what = "was removed or renamed"
    with contextlib.suppress(OSError):
        status = (folder / LOCK_FILE).stat()
        if (status.st_dev, status.st_ino) == inode:
            return
        what = "was replaced by another run's"
    raise RunDirectoryLostError(
        f"{folder} {what} while this run was writing to it, and its checkpoints with it. "
        "Nothing more can be saved, so this run ends. Start the command again."
    )


def why_not_writable(folder: Path) -> str | None:
    """Returns why a folder, which may not exist yet, is not writable; None if it is."""
    existing = folder.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
    except OSError as error:
        return f"--output-dir {folder}: {error.strerror}. Name another folder."
    if not existing.is_dir():
        return f"--output-dir {folder}: {existing} is a file. Name a folder."
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"--output-dir {folder}: {existing} cannot be written to. Name another folder."
    return None
