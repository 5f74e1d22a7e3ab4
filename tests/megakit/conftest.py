"""A small model's checkpoint, for tests that change it."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def original(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.megakit.models.networks import Net, NetConfig, save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("original"), Net(NetConfig()))


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))
