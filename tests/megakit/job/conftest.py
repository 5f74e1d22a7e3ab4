"""What the tests of runs share."""

import pytest

from tests.megakit.job.stages import FirstOptions


@pytest.fixture
def lines():
    return []


@pytest.fixture
def options(tmp_path):
    return FirstOptions(output_dir=tmp_path / "runs", accelerator="cpu")
