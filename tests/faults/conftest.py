"""The runs that nothing happens to, for the others to be compared with."""

from typing import Any

import pytest

from tests.faults.harness import Training


@pytest.fixture(scope="session")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What pretraining leaves behind that runs from its first step to its last in one go."""
    training = Training(tmp_path_factory.mktemp("never-stopped"))
    start = training.start()
    assert start.status == 0, start.err
    return training.result()
