"""A checkpoint to read, change and damage."""

import pytest

from tests.fabricate import make_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path, 500, val_loss=0.125, run={"seed": 1, "lr": 1e-3, "n": None})
