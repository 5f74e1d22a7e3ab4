"""The runs that nothing happens to, for the others to be compared with."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import Training
from tests.once import once


@pytest.fixture(scope="session")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What pretraining leaves behind that runs from its first step to its last in one go."""

    def make(folder: Path) -> None:
        start = Training(folder).start()
        assert start.status == 0, start.err

    return Training(once(tmp_path_factory, "never-stopped", make)).result()
