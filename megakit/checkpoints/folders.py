"""Where things lie in a checkpoint and in a folder of them."""

import re
from pathlib import Path

MANIFEST = "manifest.json"
WEIGHTS = "weights"
CONTEXT = "context"
METRICS = "metrics.csv"
_STEP = re.compile(r"step=(\d{6,})")


def checkpoint_name(step: int) -> str:
    """The folder's name of the checkpoint after `step` optimizer steps."""
    return f"step={step:06d}"


def weights_folder(checkpoint: Path) -> Path:
    """The folder with the weights; very old checkpoints of NeMo have them at the top."""
    folder = checkpoint / WEIGHTS
    return folder if folder.is_dir() else checkpoint


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; what is half-written has another name."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name tells.

    Raises:
        ValueError: The name is not one of a checkpoint.
    """
    step = step_in_name(checkpoint)
    if step is None:
        raise ValueError(f"{checkpoint}: not named like a checkpoint, such as step=000500")
    return step


def step_in_name(checkpoint: Path) -> int | None:
    """The step that a checkpoint's name tells; None where a user chose the name."""
    match = _STEP.fullmatch(checkpoint.name)
    return int(match.group(1)) if match else None
