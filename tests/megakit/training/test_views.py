"""What is looked at in validation, and what becomes of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("megatron")


class Board:
    """Remembers what it was given to show."""

    latent: Any = None

    def __init__(self) -> None:
        self.images: list[tuple[str, int]] = []

    def add_image(self, name: str, image: Any, step: int) -> None:
        assert image.dtype == np.uint8
        assert image.shape[2] == 3
        self.images.append((name, step))

    def add_latent_space(self, latent: Any, label: Any, images: Any, step: int) -> None:
        self.latent = latent, label, images


def shown_latent_space(board: Board) -> Any:
    return board.latent


def validate(callback: Any, step: int, sizes: tuple[int, ...], padding: int = 0) -> None:
    """One validation after a step of 40, of micro batches of the given sizes."""
    import torch
    from nemo.lightning.megatron_parallel import CallbackConnector

    connector = CallbackConnector()
    trainer: Any = SimpleNamespace(
        global_step=step,
        max_steps=40,
        should_stop=False,
        callbacks=[callback],
        world_size=1,
        sanity_checking=False,
        state=SimpleNamespace(fn="fit"),
        strategy=SimpleNamespace(model=SimpleNamespace(callbacks=connector)),
    )
    connector.add(callback)
    assert connector.callbacks == {}  # in training it is told of nothing
    callback.on_validation_start(trainer, None)
    start = 0
    for size in sizes:
        number = torch.arange(start, start + size)
        mask = torch.ones(size)
        if padding and size == sizes[-1]:
            mask[-padding:] = 0
        batch = {
            "data": number.view(-1, 1, 1, 1).expand(-1, 1, 4, 4) / 255,
            "label": number % 3,
            "loss_mask": mask,
        }
        connector.event("on_megatron_microbatch_end", step=None, batch=batch, output=number)
        start += size
    callback.on_validation_end(trainer, None)
    assert connector.callbacks == {"on_megatron_microbatch_end": []}


def pictures(**shown: Any) -> tuple[Any, Board, list[int]]:
    """The callback with a view that has what is named; how many samples were looked at."""
    import torch

    from megakit.training.views import Pictures, View

    looked_at: list[int] = []

    def view(batch: Any, output: Any) -> View:
        looked_at.append(len(output))
        parts = {
            "reconstructions": batch["data"],
            "latent": torch.stack([output, output, output], dim=1).bfloat16(),
            "logits": torch.eye(3)[(output + (output == 7)) % 3],
        }
        return View(batch["data"], batch["label"], **{name: parts[name] for name in shown})

    board = Board()
    return Pictures(view, board), board, looked_at  # type: ignore[arg-type]


def test_reconstructions_at_each_validation_of_the_first_samples_only() -> None:
    callback, board, looked_at = pictures(reconstructions=True)
    validate(callback, 10, (8, 8, 8))
    assert looked_at == [8, 8]
    validate(callback, 20, (32, 32))
    assert looked_at == [8, 8, 32]
    assert board.images == [("reconstructions", 10), ("reconstructions", 20)]


def test_at_the_end_all_samples_without_the_padding() -> None:
    callback, board, _ = pictures(latent=True)
    validate(callback, 10, (8, 8))
    assert board.latent is None
    validate(callback, 40, (8, 6), padding=2)
    latent, label, images = shown_latent_space(board)
    assert latent[:, 0].tolist() == list(range(12))
    assert latent.dtype == np.float32
    assert label.tolist() == [number % 3 for number in range(12)]
    assert images[:, 0, 0].tolist() == list(range(12))


def test_a_classifier_s_mistakes_are_shown_if_there_are_any() -> None:
    callback, board, _ = pictures(logits=True)
    validate(callback, 40, (8, 8))
    assert board.images == [("mistakes", 40)]
    callback, board, _ = pictures(logits=True)
    validate(callback, 40, (6,))  # without number 7
    assert board.images == []


@pytest.mark.parametrize(("writes_files", "sizes"), [(False, (8, 8)), (True, ())])
def test_a_rank_that_has_nothing_to_draw(writes_files: bool, sizes: tuple[int, ...]) -> None:
    """It writes no files, or there was no batch. It looks at its samples all the same."""
    callback, board, looked_at = pictures(reconstructions=True, latent=True, logits=True)
    if not writes_files:
        callback.tensorboard = None
    validate(callback, 40, sizes)
    assert looked_at == [*sizes]
    assert (board.images, board.latent) == ([], None)


def test_views_of_both_models(tmp_path: Path) -> None:
    import torch

    from mnist.dataset import MnistBatch
    from mnist.views import view_of_autoencoder, view_of_classifier

    batch: MnistBatch = {
        "data": torch.rand(2, 1, 28, 28),
        "label": torch.tensor([3, 4]),
        "idx": torch.tensor([0, 1]),
    }
    view = view_of_autoencoder(batch, {"x_hat": batch["data"].flatten(1), "z": torch.ones(2, 3)})
    assert view.reconstructions is not None
    assert torch.equal(view.reconstructions, batch["data"])
    assert view.logits is None
    assert view_of_classifier(batch, torch.ones(2, 10)).latent is None
