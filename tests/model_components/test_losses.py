"""Both losses by hand, and however the images are cut into batches."""

import math
from types import ModuleType
from typing import Any

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


def a_batch(size: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Images and labels, and what models of both kinds return on them."""
    generator = torch.Generator().manual_seed(1)
    batch = {
        "data": torch.rand(size, 1, 28, 28, generator=generator),
        "label": torch.randint(10, (size,), generator=generator),
    }
    x_hat = torch.rand(size, 784, generator=generator, requires_grad=True)
    logits = torch.rand(size, 10, generator=generator, requires_grad=True)
    return batch, {"MSELossReduction": {"x_hat": x_hat}, "ClassifierLossReduction": logits}


@pytest.mark.parametrize("name", ["MSELossReduction", "ClassifierLossReduction"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 10, 16])
def test_padding_never_changes_the_mean(components: ModuleType, name: str, batch_size: int) -> None:
    """Ten images, in batches of any size, with NeMo's mean over steps of equal weight."""
    from megakit.data.loader import make_loader
    from megakit.data.sampler import GlobalBatchSampler

    loss = getattr(components, name)()
    batch, outputs = a_batch(10)
    _, plain = loss.forward(batch, outputs[name])
    dataset = [{key: batch[key][i] for key in batch} | {"idx": i} for i in range(10)]
    sampler = GlobalBatchSampler(10, batch_size, batch_size, pad=True)
    template: Any = torch.utils.data.DataLoader(dataset)  # type: ignore[arg-type]
    means = []
    for part in make_loader(template, sampler, mark_padding=True):
        output, indices = outputs[name], part["idx"]
        if isinstance(output, dict):
            output = {"x_hat": output["x_hat"][indices]}
        else:
            output = output[indices]
        means.append(loss.reduce([loss.forward(part, output)[1]]))
    assert len(means) == -(-10 // batch_size)
    torch.testing.assert_close(torch.stack(means).mean(), plain["avg"])
