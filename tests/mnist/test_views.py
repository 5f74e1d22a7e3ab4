"""What is looked at in validation, and what becomes of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def board(tmp_path: Path) -> Any:
    """A logger that remembers what it was given to show."""
    from megakit.reporting.tensorboard import RunLogger

    board: Any = RunLogger(tmp_path, "test")
    board.images, board.latent = [], None
    board.add_image = lambda name, image, step: board.images.append((name, step, image.shape[2]))
    board.add_latent_space = lambda *parts: setattr(board, "latent", parts)
    return board


def validate(board: Any, step: int, *sizes: int, callback: Any = None, **state: Any) -> list[int]:
    """One validation after a step of 40, of micro batches of the given sizes.

    The last two samples of a micro batch of 6 are padding. Returns the sizes of the batches that
    were looked at.
    """
    import torch

    from mnist.views import LogPictures, View

    looked_at: list[int] = []

    def view(batch: Any, output: Any) -> View:
        looked_at.append(len(output))
        return View(
            batch["data"],
            batch["label"],
            reconstructions=batch["data"],
            latent=torch.stack([output, output, output], dim=1).bfloat16(),
            logits=torch.eye(3)[(output + (output == 7)) % 3],  # 7 is a mistake
        )

    pictures = LogPictures(view)
    observers: list[Any] = []
    settings: dict[str, Any] = {
        "global_step": step,
        "max_steps": 40,
        "should_stop": False,
        "callbacks": [pictures, *([callback] if callback else [])],
        "loggers": [board],
        "is_global_zero": True,
        "world_size": 1,
        "sanity_checking": False,
        "state": SimpleNamespace(fn="fit"),
        "strategy": SimpleNamespace(observers=observers),
    }
    trainer: Any = SimpleNamespace(**settings | state)
    module: Any = None
    pictures.on_validation_start(trainer, module)
    start = 0
    for size in sizes:
        number = torch.arange(start, start + size)
        batch = {
            "data": number.view(-1, 1, 1, 1).expand(-1, 1, 4, 4) / 255,
            "label": number % 3,
            "loss_mask": torch.ones(size) if size != 6 else torch.tensor([1.0] * 4 + [0] * 2),
        }
        for observe in observers:
            observe(batch, number)
        start += size
    pictures.on_validation_end(trainer, module)
    assert observers == []
    return looked_at


def test_some_reconstructions_at_each_validation_and_all_samples_at_the_end(board: Any) -> None:
    assert validate(board, 10, 8, 8, 8) == [8, 8]
    assert validate(board, 20, 32, 32) == [32]
    assert board.images == [("reconstructions", 10, 3), ("reconstructions", 20, 3)]
    assert [board.latent] == [None]
    assert validate(board, 40, 8, 6) == [8, 6]
    assert board.images[2:] == [("reconstructions", 40, 3), ("mistakes", 40, 3)]
    latent, label, images, step = board.latent
    assert latent[:, 0].tolist() == list(range(12))  # without the padding
    assert latent.dtype == "float32"
    assert label.tolist() == [number % 3 for number in range(12)]
    assert images[:, 0, 0].tolist() == list(range(12))
    assert step == 40


def test_no_mistakes_no_picture(board: Any) -> None:
    validate(board, 40, 7)
    assert [name for name, _, _ in board.images] == ["reconstructions"]


@pytest.mark.parametrize(("waited", "is_last"), [(0, False), (1, True)])
def test_a_validation_after_which_training_may_stop_early(
    board: Any, waited: int, is_last: bool
) -> None:
    """All samples are looked at, and shown if training does stop."""
    from lightning.pytorch.callbacks import EarlyStopping

    stop = EarlyStopping("val_loss", patience=2)
    stop.wait_count = waited
    looked_at = validate(board, 10, 16, 16, callback=stop, should_stop=is_last)
    assert looked_at == ([16, 16] if is_last else [16])
    assert (board.latent is not None) == is_last


@pytest.mark.parametrize(
    ("state", "looked_at"),
    [
        # Other ranks look at their samples, which rank 0 may draw.
        ({"is_global_zero": False}, [8, 8]),
        ({"loggers": []}, [8, 8]),
        ({"state": SimpleNamespace(fn="validate")}, []),
        ({"sanity_checking": True}, []),
    ],
)
def test_nothing_is_drawn(board: Any, state: Any, looked_at: list[int]) -> None:
    assert validate(board, 40, 8, 8, **state) == looked_at
    assert (board.images, board.latent) == ([], None)
