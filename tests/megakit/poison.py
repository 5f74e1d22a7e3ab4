"""Checkpoints that somebody has changed, and how they are refused."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.manifest import Manifest, list_files, write_manifest
from megakit.errors import UserError


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def load(checkpoint: Path) -> None:
    from tests.megakit.models.networks import NetConfig

    NetConfig(initial_ckpt_path=str(checkpoint)).configure_model()


def refusal(checkpoint: Path, trace: Path | None = None) -> str:
    """Loads a poisoned checkpoint with a manifest that fits it, as a stranger would make it."""
    if not any(path.is_symlink() for path in checkpoint.rglob("*")):
        files = list_files(checkpoint)
        write_manifest(checkpoint, Manifest("pretrain", "Net", "digits", 1, files=files))
    with pytest.raises(UserError) as error:
        load(checkpoint)
    assert trace is None or not trace.exists()
    return str(error.value)


def metadata_of(checkpoint: Path) -> Any:
    from megakit.runtime.safe_reading import read_metadata

    return read_metadata(checkpoint / "weights" / ".metadata")


def write_metadata(checkpoint: Path, metadata: Any) -> None:
    (checkpoint / "weights" / ".metadata").write_bytes(pickle.dumps(metadata))
