"""Both losses by hand."""

import math
from types import ModuleType

import pytest
import torch


def test_mean_squared_error_by_hand(components: ModuleType) -> None:
    images = torch.zeros(2, 1, 28, 28)
    x_hat = torch.zeros(2, 784)
    x_hat[0] = 0.5
    x_hat[1, :196] = 1.0  # a quarter of the pixels
    batch = {"data": images, "corrupted": torch.ones_like(images)}  # these are not the target
    loss, reported = components.MSELossReduction().forward(batch, {"x_hat": x_hat})
    assert loss.item() == reported["avg"].item() == (0.25 + 0.25) / 2


def test_the_target_is_not_rounded_to_the_models_precision(components: ModuleType) -> None:
    images = torch.full((1, 1, 28, 28), 0.501)  # 0.5 in bfloat16
    x_hat = torch.full((1, 784), 0.5, dtype=torch.bfloat16)
    loss, _ = components.MSELossReduction().forward({"data": images}, {"x_hat": x_hat})
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1e-6, rel=1e-3)


def test_cross_entropy_by_hand(components: ModuleType) -> None:
    logits = torch.zeros(2, 10)
    logits[1, 3] = math.log(9)  # odds of 9 : 9
    labels = torch.tensor([7, 3])
    loss, reported = components.ClassifierLossReduction().forward({"label": labels}, logits)
    assert loss.item() == pytest.approx((math.log(10) + math.log(2)) / 2)
    assert reported["avg"].item() == loss.item()
