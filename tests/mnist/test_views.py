"""What is looked at in validation, and what becomes of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def board(tmp_path: Path) -> Any:
    """A logger that remembers what it was given to show."""
    from megakit.reporting.tensorboard import RunLogger

    board: Any = RunLogger(tmp_path, "test")
    board.images, board.latent = [], None

    def add_image(name: str, image: Any, step: int) -> None:
        assert image.dtype == np.uint8
        assert image.shape[2] == 3
        board.images.append((name, step))

    def add_latent_space(latent: Any, label: Any, images: Any, step: int) -> None:
        board.latent = latent, label, images

    board.add_image, board.add_latent_space = add_image, add_latent_space
    return board


def validate(
    callback: Any,
    board: Any,
    step: int,
    sizes: tuple[int, ...],
    padding: int = 0,
    callbacks: tuple[Any, ...] = (),
    **state: Any,
) -> None:
    """One validation after a step of 40, of micro batches of the given sizes."""
    import torch

    observers: list[Any] = []
    settings: dict[str, Any] = {
        "global_step": step,
        "max_steps": 40,
        "should_stop": False,
        "callbacks": [callback, *callbacks],
        "loggers": [board],
        "is_global_zero": True,
        "world_size": 1,
        "sanity_checking": False,
        "state": SimpleNamespace(fn="fit"),
        "strategy": SimpleNamespace(observers=observers),
    }
    trainer = SimpleNamespace(**settings | state)
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
        for observe in observers:
            observe(batch, number)
        start += size
    callback.on_validation_end(trainer, None)
    assert observers == []


def pictures(*shown: str) -> tuple[Any, list[int]]:
    """The callback with a view that has what is named; how many samples were looked at."""
    import torch

    from mnist.views import LogPictures, View

    looked_at: list[int] = []

    def view(batch: Any, output: Any) -> View:
        looked_at.append(len(output))
        parts = {
            "reconstructions": batch["data"],
            "latent": torch.stack([output, output, output], dim=1).bfloat16(),
            "logits": torch.eye(3)[(output + (output == 7)) % 3],
        }
        return View(batch["data"], batch["label"], **{name: parts[name] for name in shown})

    return LogPictures(view), looked_at


def test_reconstructions_at_each_validation_of_the_first_samples_only(board: Any) -> None:
    callback, looked_at = pictures("reconstructions")
    validate(callback, board, 10, (8, 8, 8))
    assert looked_at == [8, 8]
    validate(callback, board, 20, (32, 32))
    assert looked_at == [8, 8, 32]
    assert board.images == [("reconstructions", 10), ("reconstructions", 20)]


def test_at_the_end_all_samples_without_the_padding(board: Any) -> None:
    callback, _ = pictures("latent")
    validate(callback, board, 10, (8, 8))
    assert [board.latent] == [None]
    validate(callback, board, 40, (8, 6), padding=2)
    latent, label, images = board.latent
    assert latent[:, 0].tolist() == list(range(12))
    assert latent.dtype == np.float32
    assert label.tolist() == [number % 3 for number in range(12)]
    assert images[:, 0, 0].tolist() == list(range(12))


@pytest.mark.parametrize(("waited", "is_last"), [(0, False), (1, True)])
def test_a_validation_after_which_training_may_stop_early(
    board: Any, waited: int, is_last: bool
) -> None:
    """All samples are looked at, and shown if training does stop."""
    from lightning.pytorch.callbacks import EarlyStopping

    stop = EarlyStopping("val_loss", patience=2)
    stop.wait_count = waited
    callback, looked_at = pictures("latent")
    validate(callback, board, 10, (16, 16), callbacks=(stop,), should_stop=is_last)
    assert looked_at == ([16, 16] if is_last else [16])
    assert (board.latent is not None) == is_last


def test_a_classifier_s_mistakes_are_shown_if_there_are_any(board: Any) -> None:
    callback, _ = pictures("logits")
    validate(callback, board, 40, (6,))  # without number 7
    assert board.images == []
    validate(callback, board, 40, (8, 8))
    assert board.images == [("mistakes", 40)]


@pytest.mark.parametrize(
    ("sizes", "state"),
    [
        ((8, 8), {"is_global_zero": False}),
        ((8, 8), {"loggers": []}),
        ((), {}),
    ],
)
def test_a_rank_that_has_nothing_to_draw(board: Any, sizes: tuple[int, ...], state: Any) -> None:
    """It looks at its samples all the same, which another rank may draw."""
    callback, looked_at = pictures("reconstructions", "latent", "logits")
    validate(callback, board, 40, sizes, **state)
    assert looked_at == [*sizes]
    assert (board.images, board.latent) == ([], None)


def test_validations_outside_of_training_are_not_looked_at(board: Any) -> None:
    callback, looked_at = pictures("reconstructions")
    validate(callback, board, 40, (8,), state=SimpleNamespace(fn="validate"))
    validate(callback, board, 0, (8,), sanity_checking=True)
    assert looked_at == board.images == []


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
