"""Names a checkpoint and its parts, describes it in a manifest, and verifies its files."""

import hashlib
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import megakit
from megakit.errors import UserError, first, reading

MANIFEST = "manifest.json"
WEIGHTS = "weights"
CONTEXT = "context"
METRICS = "metrics.csv"
#: In version 2, the manifest contains its own digest, and checkpoints contain metrics.csv.
FORMAT_VERSION = 2
#: The key of the manifest's own digest in `manifest.json`.
OWN_DIGEST = "sha256"
#: Fields that a manifest contains only with other values than their defaults. Manifests from
#: before these fields thus keep their digests, which the next stages' runs record.
OPTIONAL_FIELDS = ("values", "higher_is_better", "final", "settings")
#: The packages whose versions a manifest and a summary record.
PACKAGES = ("torch", "lightning", "nemo_toolkit", "megatron-core")
#: The stage of a checkpoint with the weights of another program.
IMPORTED = "imported"
#: Entries of `run` about its files of code. A run may resume with other files.
FILES = "files"
CHANGES = "changes"
#: Earlier releases wrote `code` instead of `files`.
ABOUT_CODE = (FILES, CHANGES, "code")
#: The environment variable with the states of the checkpoints that this process, or the one that
#: started it, has verified by hash: a start of a job hashes each checkpoint once.
VERIFIED = "MEGAKIT_VERIFIED"
#: Size in bytes and sha256 of files, by path relative to the checkpoint.
Files = dict[str, dict[str, Any]]


class OtherFormatError(UserError):
    """Another version of this program wrote the checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """Holds the fields of `manifest.json`; the file also contains the manifest's digest.

    Attributes:
        stage: The stage that wrote the checkpoint, such as `pretrain`; or `IMPORTED`.
        model: The name of the model's class.
        val_loss: The validation loss after this step; None without a validation.
        run: The identity of the run, option by option.
        files: All other files of the checkpoint.
        values: The other validated values after this step, by column of metrics.csv.
        higher_is_better: Whether the best checkpoint has the highest value of `--best-by`.
        final: Whether the run ended with this checkpoint before its last step.
        settings: Settings of the model, such as its sizes; of NeMo, the context has them.
    """

    stage: str
    model: str
    dataset: str
    step: int
    val_loss: float | None = None
    run: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    values: dict[str, float] = field(default_factory=dict)
    higher_is_better: bool = False
    final: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, Any]:
        """Returns the fields as `manifest.json` stores them."""
        content = asdict(self)
        return {k: v for k, v in content.items() if k not in OPTIONAL_FIELDS or v}

    @property
    def digest(self) -> str:
        """Returns the sha256 of this manifest, which identifies the checkpoint and its files."""
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()

    def validated(self, column: str) -> float | None:
        """Returns the validated value of a column of metrics.csv after this step, or None."""
        return self.val_loss if column == "val_loss" else self.values.get(column)

    def belongs_to(self, stage: str, run: Mapping[str, Any]) -> bool:
        """Returns whether a run of a stage wrote this checkpoint; its files may differ."""
        return self.stage == stage and same_run(self.run, run)

    def ends(self, max_steps: object) -> bool:
        """Returns whether a run of `max_steps` steps ended with this checkpoint."""
        return self.final or self.step == max_steps


def same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two identities belong to the same run; their files may differ."""
    code = dict.fromkeys(ABOUT_CODE)
    return {**one, **code} == {**other, **code}


def installed_versions() -> dict[str, str]:
    """Returns versions by package; "unknown" for one built without metadata, as in containers."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and --help needs neither

    versions = {"megakit": megakit.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def checkpoint_name(step: int) -> str:
    """Returns the folder name of the checkpoint after `step` optimizer steps."""
    return f"step={step:06d}"


def step_in_name(checkpoint: Path) -> int | None:
    """Returns the step in a checkpoint's name; None if a user chose another name."""
    match = re.fullmatch(r"step=(\d{6,})", checkpoint.name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, oldest first; incomplete ones have other names."""
    steps = {path: step_in_name(path) for path in folder.glob("step=*") if path.is_dir()}
    found = {path: step for path, step in steps.items() if step is not None}
    return sorted(found, key=found.__getitem__)


def describe(path: Path, digest: str | None = None) -> dict[str, Any]:
    """Returns size and sha256 of a file; a file whose sha256 is given is not opened."""
    if digest is None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def list_files(checkpoint: Path, known: Files | None = None) -> Files:
    """Describes every file in a checkpoint but the manifest; copies each known sha256."""

    def fail(error: OSError) -> None:  # `rglob` would skip what cannot be read
        raise error

    known, found = known or {}, {}
    for folder, _, names in os.walk(checkpoint, onerror=fail):
        for path in (Path(folder, name) for name in names):
            name = path.relative_to(checkpoint).as_posix()
            if name != MANIFEST:
                found[name] = describe(path, known.get(name, {}).get("sha256"))
    return dict(sorted(found.items()))


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`; all other files have to be complete."""
    content = manifest.content | {OWN_DIGEST: manifest.digest}
    (checkpoint / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def read_manifest(checkpoint: Path) -> Manifest:
    """Reads and checks `manifest.json`, without reading the other files.

    Raises:
        UserError: There is no manifest, or it cannot be parsed, was edited, or has another step
            than the name of the folder.
        OtherFormatError: Another version of this program wrote the checkpoint.
    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        problem = "there is no such checkpoint"
        if checkpoint.is_dir():
            problem = f"not a complete checkpoint: {MANIFEST} is missing"
        raise UserError(
            f"{checkpoint}: {problem}. Name a folder such as runs/pretrain/checkpoints/step=000500."
        )
    with reading(path, "Use another checkpoint."):
        content = json.loads(path.read_bytes())
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise OtherFormatError(
                f"{path}: format version {version!r:.100}; this program reads version "
                f"{FORMAT_VERSION}. Use the version of the program that wrote the checkpoint, or "
                "start over with --fresh."
            )
        digest = content.pop(OWN_DIGEST)
        manifest = Manifest(**content)
        if not all(isinstance(one, dict) for one in (manifest.run, manifest.files)):
            raise TypeError("its run and its files are not objects")
        if digest != manifest.digest:
            raise ValueError("it was edited: its sha256 differs")
    if step_in_name(checkpoint) not in (None, manifest.step):
        raise UserError(
            f"{checkpoint}: contains the checkpoint of step {manifest.step}, so the folder was "
            "renamed or replaced. Give the folder its old name, or use another checkpoint."
        )
    return manifest


def verify(checkpoint: Path, by_hash: bool = True) -> Manifest:
    """Reads the manifest and compares every file of the checkpoint with it, or only the sizes.

    Only files that are in the checkpoint are opened, whatever paths the manifest lists. Files that
    did not change since this job verified them are not hashed again.

    Raises:
        UserError: The message names missing, altered and unexpected files.
    """
    manifest = read_manifest(checkpoint)
    with reading(checkpoint, "Use another checkpoint."):
        state, verified = _state_on_disk(checkpoint), os.environ.get(VERIFIED, "")
        by_hash = by_hash and state not in verified.split()
        found = list_files(checkpoint, None if by_hash else manifest.files)
    names = found.keys() | manifest.files.keys()
    if wrong := sorted(name for name in names if found.get(name) != manifest.files.get(name)):
        raise UserError(
            f"{checkpoint}: damaged. Missing, altered after it was written, or from elsewhere: "
            f"{', '.join(first(wrong))}. Use another checkpoint."
        )
    if by_hash:
        os.environ[VERIFIED] = f"{verified} {state}"
    return manifest


def _state_on_disk(checkpoint: Path) -> str:
    """Returns a word that changes with every change of a file, as the system notes its time."""
    newest = max(path.stat().st_ctime for path in (checkpoint, *checkpoint.rglob("*")))
    # A second change within the clock's resolution would have the same time.
    is_certain = newest < time.time() - 1
    return f"{checkpoint.stat().st_ino}:{newest}" if is_certain else ""


def verify_if_possible(checkpoint: Path) -> None:
    """Verifies a checkpoint on rank 0; warns if it has no manifest, as NeMo's own checkpoints."""
    if os.environ.get("RANK", "0") != "0":
        return
    if (checkpoint / MANIFEST).is_file():
        verify(checkpoint)
    else:
        warnings.warn(
            f"{checkpoint} has no {MANIFEST}, so the checkpoint could not be verified.",
            stacklevel=2,
        )
