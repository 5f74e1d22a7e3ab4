"""Manages run directories: their files, their locks, and their checkpoints."""

import contextlib
import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megakit.checkpoints.manifest import list_checkpoints, read_manifest, same_run
from megakit.checkpoints.select import best_of
from megakit.errors import UserError


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
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        """The file for the frameworks' output."""
        return self.path / "log.txt"

    def best_checkpoint(self) -> Path | None:
        """Returns the checkpoint that the next stage uses, or None if there is no checkpoint.

        Raises:
            UserError: A checkpoint is damaged, or belongs to another run than the newest.
        """
        manifests = {path: read_manifest(path) for path in list_checkpoints(self.checkpoints)}
        identity = next(reversed(manifests.values())).run if manifests else {}
        for path, manifest in manifests.items():
            if not same_run(manifest.run, identity):
                raise UserError(
                    f"{path}: belongs to another run than the newest checkpoint in {self.path}. "
                    "Move it away, or name the checkpoint to use with --checkpoint."
                )
        return best_of(manifests, identity.get("best_by", "val_loss"))

    def lock(self) -> IO[str]:
        """Locks the directory against other processes; creates it if necessary.

        The lock file is in the directory itself, so two paths to one directory share one lock.

        Returns:
            The open lock file; it is not writable if the directory is not. The lock holds until the
            file is closed, or this process ends.

        Raises:
            UserError: Another process uses the directory, or the system refuses the file.
        """
        path = self.path / ".lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = path.open("a+" if os.access(self.path, os.W_OK) else "r")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise BlockingIOError  # meanwhile, another process has set the directory aside
        except BlockingIOError:
            file.close()
            raise UserError(
                f"{self.path} is in use by {self.holder()}. Wait for it, end it, or use another "
                "--output-dir."
            ) from None
        except OSError as error:
            raise UserError(
                f"{error.filename or path}: cannot be created, opened or locked "
                f"({error.strerror}). Use another --output-dir."
            ) from error
        if file.writable():
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        return file

    def holder(self) -> str:
        """Returns which process has locked the directory."""
        with contextlib.suppress(OSError):
            return (self.path / ".lock").read_text().strip() or "another process"
        return ""
