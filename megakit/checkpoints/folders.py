"""Defines the layout of a checkpoint, and the names of checkpoints in a folder."""

import re
from pathlib import Path

MANIFEST = "manifest.json"
WEIGHTS = "weights"
CONTEXT = "context"
METRICS = "metrics.csv"
_STEP = re.compile(r"step=(\d{6,})")


def checkpoint_name(step: int) -> str:
    """Returns the folder name of the checkpoint after `step` optimizer steps."""
    return f"step={step:06d}"


def weights_folder(checkpoint: Path) -> Path:
    """Returns the folder with the weights; in very old NeMo checkpoints, the checkpoint itself."""
    folder = checkpoint / WEIGHTS
    return folder if folder.is_dir() else checkpoint


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, oldest first; incomplete ones have other names."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Returns the step in a checkpoint's name.

    Raises:
        ValueError: The name is not the name of a checkpoint.
    """
    step = step_in_name(checkpoint)
    if step is None:
        raise ValueError(f"{checkpoint}: not named like a checkpoint, such as step=000500")
    return step


def step_in_name(checkpoint: Path) -> int | None:
    """Returns the step in a checkpoint's name; None if a user chose another name."""
    match = _STEP.fullmatch(checkpoint.name)
    return int(match.group(1)) if match else None
