"""What TensorBoard shows: the first samples that have a height and a width, nothing of others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


def drawn_from(make_view: Any, batches: Any) -> dict[str, Any]:
    """What a last validation shows of batches and outputs."""
    from mnist.views import LogPictures, _joined

    drawn: dict[str, Any] = {}
    logger: Any = SimpleNamespace(
        add_image=lambda name, image, step: drawn.update({name: image}),
        add_latent_space=lambda *columns: drawn.update({"latent space": columns}),
    )
    pictures = LogPictures(make_view)
    for batch, output in batches:
        pictures.collect({**batch, "loss_mask": torch.arange(len(batch["label"])) < 90}, output)
        for tensor in output.values() if isinstance(output, dict) else [output]:
            tensor.zero_()  # as a loss may do
    if seen := _joined(pictures._views):
        pictures.draw(logger, seen, step=1, is_last=True)
    return drawn


@pytest.mark.parametrize("shape", [(2, 5, 5), (50,)])
def test_images_and_reconstructions(shape: tuple[int, ...]) -> None:
    """Enough samples of the first micro batches, without padding; nothing of other samples."""
    from mnist.views import view_of_autoencoder

    batches = []
    for number in range(20):
        label = torch.full((100,), number)
        output = {"x_hat": torch.ones(100, 50), "z": torch.full((100, 3), number + 1.0)}
        batches.append(({"data": torch.zeros(100, *shape), "label": label}, output))
    drawn = drawn_from(view_of_autoencoder, batches)
    if len(shape) == 1:
        assert drawn == {}
        return
    latent, label, images, _ = drawn["latent space"]
    assert label.tolist() == [number for number in range(10) for _ in range(90)]
    assert (latent[:, 0] == label + 1).all()
    assert images.shape == (900, 5, 5)
    ink = (drawn["reconstructions"] == 0).all(axis=2)
    assert ink.sum() == 10 * 15 * 15  # each of the second row's pixels is 3 wide
    assert not ink[: len(ink) // 2].any()


def test_mistakes_of_a_classifier_and_none_of_a_regression() -> None:
    from mnist.views import view_of_classifier

    data, logits = torch.zeros(4, 1, 10, 10), torch.eye(4)
    batch = {"data": data, "label": torch.tensor([0, 1, 2, 2])}
    assert drawn_from(view_of_classifier, [(batch, logits)]).keys() == {"mistakes"}
    right = {"data": data, "label": torch.arange(4)}
    assert drawn_from(view_of_classifier, [(right, torch.eye(4))]) == {}
    regression = {"data": data, "label": torch.rand(4, 1)}
    assert drawn_from(view_of_classifier, [(regression, torch.rand(4, 1))]) == {}
