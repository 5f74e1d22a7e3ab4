"""What TensorBoard shows: pictures of samples that have a height and a width, nothing of others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize(("shape", "expected"), [((2, 5, 5), ["reconstructions"]), ((30,), [])])
def test_only_images_are_drawn(shape: tuple[int, ...], expected: list[str]) -> None:
    from mnist.views import LogPictures, view_of_autoencoder

    drawn: list[str] = []
    logger: Any = SimpleNamespace(add_image=lambda name, image, step: drawn.append(name))
    pictures = LogPictures(view_of_autoencoder)
    pictures._num_missing = 4
    batch = {"data": torch.rand(4, *shape), "label": torch.zeros(4, dtype=torch.long)}
    x_hat = torch.rand(4, batch["data"][0].numel())
    pictures.collect(batch, {"x_hat": x_hat, "z": torch.rand(4, 3)})
    pictures._draw(logger, pictures._collected[0], step=1, is_last=False)
    assert drawn == expected
