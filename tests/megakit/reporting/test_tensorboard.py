"""What is written for TensorBoard, read by TensorBoard's own reader."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("megatron")


def open_logger(folder: Path, resumed_step: int = 0) -> Any:
    from megakit.reporting.tensorboard import RunLogger

    return RunLogger(folder, "pretrain", resumed_step)


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in read(folder).Scalars(name)]


def test_one_name_in_two_folders_makes_one_chart(tmp_path: Path) -> None:
    """A value that Lightning logs as well, with the epoch, is written once."""
    logger = open_logger(tmp_path)
    assert copy.deepcopy([logger])[0] is logger  # NeMo copies what it is given
    for step in (10, 20):
        logger.log_metrics({"train_margin": 2.0, "epoch": 0}, step)
        logger.log_metrics({"train_loss": 5 / step, "grad_norm": 0.5, "train_margin": 2.0}, step)
    logger.log_metrics({"val_loss": 0.25, "val_accuracy": 0.5}, 20)
    logger.save()
    train, validation = tmp_path / "tensorboard" / "train", tmp_path / "tensorboard" / "validation"
    assert points(train, "pretrain/loss") == [(10, 0.5), (20, 0.25)]
    assert points(train, "pretrain/margin") == [(10, 2.0), (20, 2.0)]
    assert points(validation, "pretrain/loss") == [(20, 0.25)]
    names = ["pretrain/margin", "pretrain/loss", "pretrain/grad_norm"]
    assert read(train).Tags()["scalars"] == names
    assert read(validation).Tags()["scalars"] == ["pretrain/loss", "pretrain/accuracy"]


def test_a_resumption_hides_what_it_repeats(tmp_path: Path) -> None:
    black, white = (np.full((4, 6, 3), shade, np.uint8) for shade in (0, 255))
    first = open_logger(tmp_path)
    for step in (10, 20, 30):
        first.log_metrics({"train_loss": 1.0, "val_loss": 1.0}, step)
        first.add_image("picture", black, step)
    first.save()
    for path in tmp_path.rglob("events.*"):  # readers go by the names, which begin with the second
        path.rename(path.with_name("events.out.tfevents.1000000000.earlier"))
    second = open_logger(tmp_path, resumed_step=10)
    second.log_metrics({"train_loss": 0.5, "val_loss": 0.5}, 20)
    second.add_image("picture", white, 20)
    second.save()
    for part in ("train", "validation"):
        folder = tmp_path / "tensorboard" / part
        assert points(folder, "pretrain/loss") == [(10, 1.0), (20, 0.5)]
    images = read(tmp_path / "tensorboard" / "validation").Images("pretrain_pictures/picture")
    assert [image.step for image in images] == [10, 20]
    assert images[0].encoded_image_string != images[1].encoded_image_string
