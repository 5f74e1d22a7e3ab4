"""What a run is: its directory, what identifies it, where it goes on from."""

import contextlib
import fcntl
import json
import os
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megakit.checkpoints.layout import list_checkpoints, step_of
from megakit.checkpoints.manifest import Manifest, read_manifest, verify
from megakit.checkpoints.select import (
    BestBy,
    best_checkpoint,
    newest_intact_checkpoint,
    remove_leftovers,
    set_aside,
)
from megakit.errors import UserError
from megakit.training.options import flag

RUN_FILE = "run.json"
#: What identifies a run besides its options.
NO_OPTIONS = ("model", "best_by")
SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a chain of scripts.

    Attributes:
        name: Also the name of its folder below the output directory.
        script: The file that runs it.
        model: Name of the model's class.
        title: What a person calls the model, with its article.
        before: The stage whose best checkpoint this one starts from, if any.
        width: What tensor parallelism cuts.
        num_pipeline_stages: Stages that the model can be cut into, or a divisor of them.
        num_heads: Attention heads, which tensor parallelism deals out; 0 for a model without.
    """

    name: str
    script: str
    model: str
    title: str = "a model"
    before: "Stage | None" = None
    width: int = 1
    num_pipeline_stages: int = 1
    num_heads: int = 0


@dataclass(frozen=True)
class RunDirectory:
    """The folder of one stage below the output directory, with what lies in it."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def is_done(self) -> bool:
        """Whether the run that lives here reached its end."""
        return (self.path / SUMMARY).is_file()

    def identity(self) -> dict[str, Any] | None:
        """What identifies the run that lives here, or None if none does."""
        path = self.path / RUN_FILE
        try:
            content = json.loads(path.read_text())
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
        except FileNotFoundError:
            return self._identity_in_checkpoints()
        except ValueError as error:
            raise UserError(
                f"{path}: damaged ({error}). Use --fresh, or another --output-dir."
            ) from error
        return content

    def _identity_in_checkpoints(self) -> dict[str, Any] | None:
        """What the newest checkpoint says that can still be asked."""
        for checkpoint in reversed(list_checkpoints(self.checkpoints)):
            with contextlib.suppress(UserError):
                return read_manifest(checkpoint).run or None
        return None

    def write_identity(self, identity: dict[str, Any]) -> None:
        """Makes the folder the given run's."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f".{RUN_FILE}"
        partial.write_text(json.dumps(identity, indent=1) + "\n")
        partial.replace(self.path / RUN_FILE)

    def best_by(self) -> BestBy:
        """How the best of its checkpoints is chosen."""
        by: BestBy = (self.identity() or {}).get("best_by", "val_loss")
        return by

    def best_checkpoint(self) -> Path | None:
        """The checkpoint that the next stage uses."""
        return best_checkpoint(self.checkpoints, self.best_by())

    def set_aside(self) -> Path | None:
        """Gives the run that lives here another name, if there is one; returns the name."""
        if not self.path.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        self.path.rename(aside)
        return aside


def find_start(
    stage: Stage, named: str | None, output_dir: Path, report: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    """The checkpoint that a stage starts from, verified; None where it starts from nothing.

    Args:
        stage: Which stage starts.
        named: The user's `--checkpoint`; `none` for a fresh start.
        output_dir: Where the stage before has its run.
        report: Takes one line for the user.

    Raises:
        UserError: There is none, or it is damaged, unfinished, or of another model.
    """
    before = stage.before
    if before is None or named == "none":
        return None
    if named is not None:
        checkpoint = Path(named)
    else:
        directory = RunDirectory(output_dir / before.name)
        best = directory.best_checkpoint()
        if best is None:
            raise UserError(
                f"{directory.checkpoints}: no checkpoint to start from. "
                f"Run {before.script} with the same --output-dir first, or name one with "
                "--checkpoint."
            )
        if not directory.is_done:
            report(f"{directory.path} has not reached its end; its best checkpoint so far counts.")
        checkpoint = best
    manifest = verify(checkpoint)
    if (manifest.stage, manifest.model) != (before.name, before.model):
        titles = {known.name: known.title for known in (stage, before)}
        found = titles.get(manifest.stage, f"from stage {manifest.stage}")
        raise UserError(
            f"{checkpoint}: the model in it is {found} ({manifest.model}); {stage.script} starts "
            f"from {before.title} ({before.model}), as {before.script} makes it. "
            "Name another --checkpoint."
        )
    return checkpoint, manifest


def differences(
    directory: RunDirectory, identity: dict[str, Any], start_before: str | None
) -> list[str]:
    """In which options the run that lives in a directory differs from the one asked for."""
    old = directory.identity()
    if old is None:
        return []
    problems = []
    for name in identity.keys() | old.keys():
        if old.get(name) == identity.get(name):
            continue
        if name == "start":
            problems.append(
                f"it started from another checkpoint than {start_before or 'none'} "
                f"(the stage before has a newer result, or --checkpoint changed)"
            )
        else:
            if name == "best_by":
                continue  # follows from --num-labels, which is told
            label = name.replace("_", " ") if name in NO_OPTIONS else flag(name)
            problems.append(f"{label} was {old.get(name)}, now {identity.get(name)}")
    if not problems:
        return []
    return [
        f"{directory.path} holds another run: {'; '.join(sorted(problems))}. Give the old values "
        "to go on with it, --fresh to start over (the old run is kept under another name), or "
        "another --output-dir."
    ]


def find_resumption(
    directory: RunDirectory, report: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    """The checkpoint that an interrupted run goes on from, after cleaning up behind it."""
    if not directory.checkpoints.is_dir():
        return None
    remove_leftovers(directory.checkpoints)
    newest = list_checkpoints(directory.checkpoints)[-1:]
    found = newest_intact_checkpoint(directory.checkpoints, report)
    if newest and newest != [found[0] if found else None]:
        # The end of the run was damaged: it is not done any more, and goes on from further back.
        (directory.path / SUMMARY).unlink(missing_ok=True)
    for checkpoint in list_checkpoints(directory.checkpoints)[:-1]:
        # An older one is kept for being the best; damaged it is of no use.
        try:
            verify(checkpoint)
        except UserError as error:
            report(f"{error} It is now {set_aside(checkpoint).name}.")
    if found is not None and not directory.is_done:
        report(f"Going on from {found[0]}, step {step_of(found[0])}.")
    return found


def check_writable(folder: Path) -> list[str]:
    """Why nothing can be written below a folder that may not exist yet, if so."""
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


def lock(directory: RunDirectory) -> TextIO:
    """Keeps other processes out of a run directory for as long as this one lives.

    Returns:
        The open lock file; closing it, or the process's end, gives the directory free.

    Raises:
        UserError: Another process uses it.
    """
    directory.path.parent.mkdir(parents=True, exist_ok=True)
    path = directory.path.with_name(f".{directory.path.name}.lock")
    file = path.open("a+")
    reference = weakref.ref(file)
    # A process forked from this one, as a data loader's worker is, may outlive it by seconds.
    os.register_at_fork(after_in_child=lambda: _close(reference()))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(
            f"{directory.path} is in use by {file.read().strip() or 'another process'}. "
            "Wait for it, end it, or use another --output-dir."
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _close(file: TextIO | None) -> None:
    if file is not None:
        file.close()
