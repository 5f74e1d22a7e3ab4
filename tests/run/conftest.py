"""What the tests of `run` share."""

from pathlib import Path

import pytest

from tests.run.harness import write_project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of two packages with its own `run`; see `write_project`."""
    return write_project(tmp_path / "a project")
