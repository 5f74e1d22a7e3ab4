"""What a complete checkpoint says of itself, and whether it is still as it was written."""

import hashlib
import json
import os
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from megakit.checkpoints.layout import MANIFEST
from megakit.errors import UserError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    Attributes:
        stage: The stage of the chain that wrote it, such as `pretrain`.
        model: Name of the model's class.
        dataset: What it was trained on.
        step: Optimizer steps done.
        val_loss: Validation loss after this very step, or None if it was not validated.
        run: What identifies the run, option by option.
        versions: Of the software.
        files: Size in bytes and sha256 of every other file, by path relative to the checkpoint.
        format_version: Of this file.
    """

    stage: str
    model: str
    dataset: str
    step: int
    val_loss: float | None = None
    run: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """Tells checkpoints apart; the sha256 of this manifest, and so of all the files."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def list_files(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file below a folder but the manifest, by relative path.

    Raises:
        UserError: There is something else than files and folders, such as a symbolic link.
    """
    refuse_links(checkpoint)
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return {
        path.relative_to(checkpoint).as_posix(): {
            "size": path.stat().st_size,
            "sha256": _sha256(path),
        }
        for path in paths
        if path.name != MANIFEST or path.parent != checkpoint
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_links(checkpoint: Path) -> None:
    """Makes sure that a checkpoint consists of folders and files of its own.

    Raises:
        UserError: A symbolic link, which may lead anywhere, or a device, pipe or the like.
    """
    problems = []
    for folder, folders, files in os.walk(checkpoint):
        for name in folders + files:
            path = Path(folder, name)
            if path.is_symlink():
                problems.append(f"{path.relative_to(checkpoint)} is a symbolic link")
            elif not path.is_file() and not path.is_dir():
                problems.append(f"{path.relative_to(checkpoint)} is neither a file nor a folder")
    if problems:
        raise UserError(
            f"{checkpoint}: not to be trusted: {'; '.join(sorted(problems))}. "
            "A checkpoint holds nothing but files of its own. Use another checkpoint."
        )


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`; all other files have to be in place."""
    text = json.dumps(asdict(manifest), indent=1) + "\n"
    with (checkpoint / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> Manifest:
    """Reads `manifest.json` without looking at the other files.

    Raises:
        UserError: There is no such checkpoint, no manifest in it, or it cannot be understood.
    """
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: there is no such checkpoint.")
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{checkpoint}: no complete checkpoint, for it has no {MANIFEST}. "
            "Name a folder such as runs/pretrain/checkpoints/step=000500."
        )
    try:
        content = json.loads(path.read_text())
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(
                f"{path}: format version {version}; this program reads version {FORMAT_VERSION}. "
                "Use the version of the program that wrote it."
            )
        manifest = Manifest(**content)
        _check_types(manifest)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error}). Use another checkpoint.") from error
    outside = [name for name in manifest.files if _leads_outside(name)]
    if outside:
        raise UserError(
            f"{path}: not to be trusted: it lists {', '.join(outside)}, outside of the checkpoint. "
            "Use another checkpoint."
        )
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raises TypeError unless every field is what it has to be."""
    number = (int, float)
    for name, types in {
        **dict.fromkeys(("stage", "model"), (str,)),
        **dict.fromkeys(("run", "versions", "files"), (dict,)),
        **{"step": (int,), "val_loss": (*number, type(None))},
    }.items():
        if not isinstance(getattr(manifest, name), types):
            raise TypeError(f"{name} is {getattr(manifest, name)!r}")
    for name, entry in manifest.files.items():
        good = isinstance(entry, dict) and isinstance(entry.get("size"), int)
        if not good or not isinstance(entry.get("sha256"), str):
            raise TypeError(f"{name} has no size and sha256")


def _leads_outside(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\\" in name


def verify(checkpoint: Path) -> Manifest:
    """Reads the manifest and checks every file against it.

    Raises:
        UserError: A file is missing, cut, altered, or one too many; all of them are named. Or
            there is something that could lead outside.
    """
    manifest = read_manifest(checkpoint)
    found = list_files(checkpoint)
    problems = []
    for name, expected in manifest.files.items():
        if name not in found:
            problems.append(f"{name} is missing")
        elif found[name]["size"] != expected["size"]:
            problems.append(f"{name} has {found[name]['size']} bytes, not {expected['size']}")
        elif found[name]["sha256"] != expected["sha256"]:
            problems.append(f"{name} was altered after it was written (its sha256 differs)")
    problems += [f"{name} does not belong to it" for name in found.keys() - manifest.files.keys()]
    if problems:
        raise UserError(
            f"{checkpoint}: damaged: " + "; ".join(problems) + ". Use another checkpoint."
        )
    return manifest


def verify_if_possible(checkpoint: Path) -> None:
    """Checks a checkpoint that code names, such as one that NeMo's own ModelCheckpoint wrote.

    That one has no manifest: a warning of one line says so. The job's first process checks for all.

    Raises:
        UserError: It is damaged, or there is something in it that could lead outside.
    """
    refuse_links(checkpoint)
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) != 0:
        return
    if (checkpoint / MANIFEST).is_file():
        verify(checkpoint)
    else:
        warnings.warn(
            f"{checkpoint} has no {MANIFEST}: whether it is complete could not be verified.",
            stacklevel=2,
        )
