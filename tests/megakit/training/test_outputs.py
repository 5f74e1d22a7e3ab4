"""Outputs of a model that are no numbers are refused before anything is written."""

from typing import Any

import numpy as np
import pytest

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


def outputs(**changed: Any) -> Any:
    from megakit.training.prediction import Outputs

    numbers = np.arange(2)
    fields = {"output": np.ones((2, 10), np.float32), "latent": np.ones((2, 3), np.float32)}
    return Outputs(idx=numbers, label=numbers, **fields | changed)


@pytest.mark.parametrize("latent", [np.zeros((2, 3), np.float32), None])
def test_numbers(latent: Any) -> None:
    outputs(latent=latent).check_finite("runs/finetune/checkpoints/step=000010")


@pytest.mark.parametrize("name", ["output", "latent"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_no_numbers(name: str, number: float) -> None:
    spoilt = np.array([[1.0, 2.0, 3.0], [4.0, number, 6.0]], np.float32)
    with pytest.raises(UserError, match=r"^step=000010: the model's outputs are NaN or infinite"):
        outputs(**{name: spoilt}).check_finite("step=000010")
