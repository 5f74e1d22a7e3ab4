"""Describes a complete checkpoint in a manifest, and verifies the checkpoint's files."""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megakit.checkpoints.folders import MANIFEST, step_in_name
from megakit.errors import UserError, first, printable, reading
from megakit.runtime.foreign_files import JSON_BYTES, read_regular_file

#: In version 2, the manifest contains its own digest, and checkpoints contain metrics.csv.
FORMAT_VERSION = 2
#: Largest number of characters in the name of a stage, model or dataset, which messages quote.
LONGEST_NAME = 200
#: A large file with less than this share of its size on disk is sparse, and not weights.
SMALLEST_SHARE_ON_DISK = 1 / 64
#: Fields that older manifests of the same format version lack.
NEWER_FIELDS = ("values", "higher_is_better", "final")
#: Seconds; the coarsest clock of a file system has ticks of two seconds.
SETTLED_SECONDS = 3
#: sha256 of files by device, inode, size and change time.
_digests: dict[tuple[int, int, int, int], str] = {}
#: The key of the manifest's own digest in `manifest.json`.
OWN_DIGEST = "sha256"
#: The stage of a checkpoint with the weights of another program.
IMPORTED = "imported"
#: Entries of `run` that identify the code of a run. A run may resume with other code.
CODE = "code"
CHANGES = "changes"


class OtherFormatError(UserError):
    """Another version of this program wrote the checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """Holds the fields of `manifest.json`; the file also contains the manifest's digest.

    Attributes:
        stage: The stage that wrote the checkpoint, such as `pretrain`; or `IMPORTED`.
        model: The name of the model's class.
        dataset: The training dataset.
        step: The number of completed optimizer steps.
        val_loss: The validation loss after this step; None without a validation.
        run: The identity of the run, option by option.
        versions: The versions of the software.
        files: Size in bytes and sha256 of every other file, by path relative to the checkpoint.
        format_version: The format version of `manifest.json`.
        values: The other validated values after this step, by column of metrics.csv.
        higher_is_better: Whether the highest value of the column that `--best-by` names is the
            best; otherwise, the lowest value is the best.
        final: Whether the run ended with this checkpoint before its last step.
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
    values: dict[str, float] = field(default_factory=dict)
    higher_is_better: bool = False
    final: bool = False

    @property
    def content(self) -> dict[str, Any]:
        """Returns the fields as `manifest.json` stores them.

        Newer fields with default values are left out. The digests of older manifests, which lack
        these fields, therefore stay valid.
        """
        content = asdict(self)
        return {k: v for k, v in content.items() if k not in NEWER_FIELDS or v}

    @property
    def digest(self) -> str:
        """Returns the sha256 of this manifest, which identifies the checkpoint and its files."""
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()

    def validated(self, column: str) -> float | None:
        """Returns the validated value of a column of metrics.csv after this step, or None."""
        return self.val_loss if column == "val_loss" else self.values.get(column)

    def ends(self, max_steps: object) -> bool:
        """Returns whether a run of `max_steps` steps ended with this checkpoint."""
        return self.final or self.step == max_steps


def same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two identities belong to the same run; their code may differ."""
    without_code = [
        {name: value for name, value in identity.items() if name not in (CODE, CHANGES)}
        for identity in (one, other)
    ]
    return without_code[0] == without_code[1]


def list_files(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Returns size and sha256 of every file in a checkpoint but the manifest, by relative path.

    Raises:
        UserError: `refuse_links` refuses the checkpoint.
    """
    sizes = _list_sizes(checkpoint)
    return {name: {"size": sizes[name], "sha256": _sha256(checkpoint / name)} for name in sizes}


def _list_sizes(checkpoint: Path) -> dict[str, int]:
    refuse_links(checkpoint)
    return {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and (path.name != MANIFEST or path.parent != checkpoint)
    }


def _sha256(path: Path) -> str:
    """Returns the sha256 of a file; hashes an unchanged file once per process.

    A write sets a file's change time (ctime), and no program can choose it. Only writes through a
    memory map may set it later. A file that was changed within `SETTLED_SECONDS` is hashed each
    time: another write within the same tick of the file system's clock would leave the same ctime.
    This holds if that clock is at most so many seconds behind the clock of this machine.
    """
    with path.open("rb") as file:  # opening makes NFS ask the server for the current times
        status = os.fstat(file.fileno())
        version = (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
        is_settled = time.time() - status.st_ctime > SETTLED_SECONDS
        if is_settled and version in _digests:
            return _digests[version]
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if is_settled:
            _digests[version] = digest
        return digest


def refuse_links(checkpoint: Path) -> None:
    """Refuses a checkpoint that contains anything but folders and ordinary files.

    Raises:
        UserError: There is a symbolic link, which may lead outside the checkpoint, a device, a
            pipe, or a large sparse file.
    """
    problems = []
    for folder, folders, files in os.walk(checkpoint):
        for name in folders + files:
            path = Path(folder, name)
            relative = path.relative_to(checkpoint)
            if path.is_symlink():
                problems.append(f"{relative} is a symbolic link")
            elif not path.is_file() and not path.is_dir():
                problems.append(f"{relative} is neither a file nor a folder")
            elif _is_sparse(path):
                problems.append(f"{relative} is large and almost empty")
    if problems:
        raise UserError(
            printable(
                f"{checkpoint}: the checkpoint is unsafe: {'; '.join(first(sorted(problems)))}. "
                "Use another checkpoint."
            )
        )


def _is_sparse(path: Path) -> bool:
    """Returns whether a file is larger than 1 GiB and almost empty; hashing would take hours."""
    status = path.stat()
    size_on_disk = status.st_blocks * 512
    return status.st_size > 1 << 30 and size_on_disk < status.st_size * SMALLEST_SHARE_ON_DISK


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`; all other files have to be complete."""
    content = manifest.content | {OWN_DIGEST: manifest.digest}
    with (checkpoint / MANIFEST).open("w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> Manifest:
    """Reads and checks `manifest.json`, without reading the other files.

    Raises:
        UserError: The checkpoint or its manifest does not exist. Or the manifest cannot be parsed,
            was edited, lists files outside the checkpoint, or has another step than the name of
            the folder.
        OtherFormatError: Another version of this program wrote the checkpoint.
    """
    if not checkpoint.is_dir():
        raise UserError(
            f"{checkpoint}: there is no such checkpoint. "
            "Name a folder such as runs/pretrain/checkpoints/step=000500."
        )
    path = checkpoint / MANIFEST
    if not path.exists():
        raise UserError(
            f"{checkpoint}: not a complete checkpoint: {MANIFEST} is missing. "
            "Name a folder such as runs/pretrain/checkpoints/step=000500."
        )
    with reading(path, "Use another checkpoint."):
        content = json.loads(read_regular_file(path, JSON_BYTES))
        if not isinstance(content, dict):
            raise TypeError("not a JSON object")
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise OtherFormatError(
                f"{path}: format version {version!r:.100}; this program reads version "
                f"{FORMAT_VERSION}. Use the version of the program that wrote the checkpoint, or "
                "start over with --fresh."
            )
        digest = content.pop(OWN_DIGEST)
        manifest = Manifest(**content)
        _check_types(manifest)
        if digest != manifest.digest:
            raise ValueError("it was edited: its sha256 differs")
    outside = [
        name
        for name in manifest.files
        if Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name
    ]
    if outside:
        raise UserError(
            f"{path}: the manifest is unsafe: it lists {', '.join(first(outside))}, outside of the "
            "checkpoint. Use another checkpoint."
        )
    if step_in_name(checkpoint) not in (None, manifest.step):
        raise UserError(
            f"{checkpoint}: contains the checkpoint of step {manifest.step}, so the folder was "
            "renamed or replaced. Give the folder its old name, or use another checkpoint."
        )
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raises TypeError or ValueError if a field has a wrong type or value."""
    expected: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(("stage", "model", "dataset"), (str,)),
        **dict.fromkeys(("run", "versions", "files", "values"), (dict,)),
        **dict.fromkeys(("higher_is_better", "final"), (bool,)),
        **{"step": (int,), "val_loss": (float, type(None))},
    }
    for name, types in expected.items():
        if type(getattr(manifest, name)) not in types:
            raise TypeError(f"{name} is {getattr(manifest, name)!r:.100}")
    for name, value in manifest.values.items():
        if type(value) is not float:
            raise TypeError(f"{name!r:.100} is {value!r:.100}")
    if max(map(len, (manifest.stage, manifest.model, manifest.dataset))) > LONGEST_NAME:
        raise ValueError(f"it has a name of more than {LONGEST_NAME} characters")
    if manifest.step < 0:
        raise ValueError(f"step is {manifest.step}")
    for name, entry in manifest.files.items():
        is_entry = isinstance(entry, dict) and isinstance(entry.get("size"), int)
        if not is_entry or not isinstance(entry.get("sha256"), str):
            raise TypeError(f"{name!r:.200} has no size and sha256")
        if not name.isprintable():
            raise ValueError(f"it lists {name!r:.200}, which no checkpoint contains")


def verify(checkpoint: Path) -> Manifest:
    """Reads the manifest and checks every file of the checkpoint against it.

    Raises:
        UserError: Files are missing, truncated, altered or unexpected; the message names them. Or
            the checkpoint contains a path or link that could lead outside.
    """
    manifest = read_manifest(checkpoint)
    sizes = _list_sizes(checkpoint)
    problems = []
    for name, expected in manifest.files.items():
        if name not in sizes:
            problems.append(f"{name} is missing")
        elif sizes[name] != expected["size"]:
            problems.append(f"{name} has {sizes[name]} bytes, not {expected['size']}")
        elif _sha256(checkpoint / name) != expected["sha256"]:
            problems.append(f"{name} was altered after it was written (its sha256 differs)")
    unexpected = sizes.keys() - manifest.files.keys()
    problems += [f"{name} does not belong to the checkpoint" for name in unexpected]
    if problems:
        raise UserError(
            printable(
                f"{checkpoint}: damaged: {'; '.join(first(problems))}. Use another checkpoint."
            )
        )
    return manifest


def verify_if_possible(checkpoint: Path) -> None:
    """Verifies a checkpoint that user code names; warns if the checkpoint has no manifest.

    NeMo's own ModelCheckpoint writes no manifest. Only rank 0 reads manifest and files.

    Raises:
        UserError: The checkpoint is damaged, or contains a path or link that could lead outside.
    """
    refuse_links(checkpoint)
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) != 0:
        return
    if (checkpoint / MANIFEST).is_file():
        verify(checkpoint)
    else:
        warnings.warn(
            f"{checkpoint} has no {MANIFEST}, so the checkpoint could not be verified.",
            stacklevel=2,
        )
