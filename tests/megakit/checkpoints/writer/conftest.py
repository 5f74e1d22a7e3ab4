"""A writer, and the trainer that it saves."""

from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.manifest import Manifest
from megakit.checkpoints.writer import CheckpointWriter
from tests.megakit.checkpoints.writer.training import Trainer


@pytest.fixture
def trainer() -> Any:
    return Trainer()


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointWriter:
    def write_context(folder: Path, module: Any) -> None:
        folder.mkdir()
        (folder / "io.json").write_text("{}")

    monkeypatch.setattr("megakit.checkpoints.writer.write_context", write_context)
    return CheckpointWriter(tmp_path / "checkpoints", Manifest("pretrain", "M", "digits", 0), 10)
