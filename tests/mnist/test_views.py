"""What TensorBoard shows: some samples that have a height and a width, nothing of others."""

from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize(("shape", "expected"), [((2, 5, 5), ["reconstructions"]), ((30,), [])])
def test_only_images_are_drawn(shape: tuple[int, ...], expected: list[str]) -> None:
    from mnist.views import view_of_autoencoder

    data = torch.rand(4, *shape)
    output = {"x_hat": data.flatten(1), "z": torch.rand(4, 3)}
    batch = {"data": data, "label": torch.zeros(4, dtype=torch.long)}
    assert names_drawn(view_of_autoencoder, batch, output) == expected


@pytest.mark.parametrize("shape", [(1, 5, 5), (30,)])
def test_a_regression_has_no_mistakes(shape: tuple[int, ...]) -> None:
    """Its outputs are no logits, and its labels no classes."""
    from mnist.views import view_of_classifier

    batch = {"data": torch.rand(4, *shape), "label": torch.rand(4, 1)}
    assert names_drawn(view_of_classifier, batch, torch.rand(4, 1)) == []


def names_drawn(make_view: Any, batch: Any, output: Any) -> list[str]:
    """What a last validation of one batch shows."""
    from mnist.views import LogPictures

    pictures = LogPictures(make_view)
    pictures._num_missing = len(batch["data"])
    pictures.collect(batch, output)
    if pictures._held:
        pictures._take_held()
    names = [name for seen in pictures._seen for name in drawn_from(pictures, seen)]
    return [name for name in names if name not in "zlis"]


def drawn_from(pictures: Any, seen: Any) -> dict[str, Any]:
    """Returns what a last validation draws of samples."""
    from mnist import views

    drawn: dict[str, Any] = {}
    logger: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "add_image", lambda _, name, image, step: drawn.update({name: image}))
        patch.setattr(
            *(views, "add_latent_space"),
            lambda _, *columns: drawn.update(zip("zlis", columns, strict=True)),
        )
        pictures._draw(logger, seen, step=1, is_last=True)
    return drawn


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_sends_the_samples_that_can_be_drawn(num_ranks: int) -> None:
    """They give the pictures of all samples: equal mistakes stay in order, padding is none."""
    from mnist.views import LogPictures, View, _joined

    total, size = 1500 * num_ranks, 60
    dice = torch.Generator().manual_seed(1)
    columns = {
        "images": torch.randint(0, 256, (total, 1, 5, 5), generator=dice) / 255,
        "label": torch.randint(0, 4, (total,), generator=dice),
        "reconstructions": torch.randint(0, 256, (total, 1, 5, 5), generator=dice) / 255,
        "latent": torch.rand(total, 3, generator=dice),
        "logits": torch.randint(0, 9, (total, 4), generator=dice).float(),  # many are equal
    }
    mask = (torch.arange(total) < total - 70).float()
    sent: list[Any] = []
    for rank in torch.arange(total).split(total // num_ranks):
        pictures = LogPictures(lambda batch, output: View(**output))
        pictures._num_missing = 2 * total
        for rows in rank.split(size):
            output = {name: column[rows] for name, column in columns.items()}
            pictures.collect({"loss_mask": mask[rows]}, output)
            for tensor in output.values():  # as a loss may do
                tensor.zero_()
        pictures._take_held()
        sent += pictures._seen
        assert len(sent[-1]["label"]) <= pictures.NUM_POINTS + pictures.NUM_MISTAKES
    real: Any = {name: column[mask > 0].numpy() for name, column in columns.items()}
    for name in ("images", "reconstructions"):
        real[name] = (real[name][:, 0] * 255).round().astype(np.uint8)
    found, expected = (drawn_from(pictures, seen) for seen in (_joined(sent), real))
    assert found.keys() == {"reconstructions", "mistakes", *"zlis"}
    for name, drawn in expected.items():
        assert np.array_equal(found[name], drawn), name
