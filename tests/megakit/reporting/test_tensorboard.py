"""What is written for TensorBoard, read by TensorBoard's own reader."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("megatron")


def open_board(folder: Path, after: int = 0) -> Any:
    from lightning.pytorch.loggers import TensorBoardLogger

    from megakit.reporting.tensorboard import TensorBoard

    logger = TensorBoardLogger(
        folder, name="", version="tensorboard", default_hp_metric=False, purge_step=after + 1
    )
    return TensorBoard(logger, "pretrain", after)


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in read(folder).Scalars(name)]


def test_one_name_in_two_folders_makes_one_chart(tmp_path: Path) -> None:
    board = open_board(tmp_path)
    for step in (10, 20):
        board.add_values("train", {"loss": 5 / step, "grad_norm": 0.5}, step)
    board.add_values("validation", {"loss": 0.25, "missing": None}, 20)
    board.flush()
    train, validation = tmp_path / "tensorboard" / "train", tmp_path / "tensorboard" / "validation"
    assert points(train, "pretrain/loss") == [(10, 0.5), (20, 0.25)]
    assert points(validation, "pretrain/loss") == [(20, 0.25)]
    assert read(train).Tags()["scalars"] == ["pretrain/loss", "pretrain/grad_norm"]
    assert read(validation).Tags()["scalars"] == ["pretrain/loss"]


def test_a_resumption_hides_what_it_repeats(tmp_path: Path) -> None:
    black, white = (np.full((4, 6, 3), shade, np.uint8) for shade in (0, 255))
    first = open_board(tmp_path)
    for step in (10, 20, 30):
        first.add_values("train", {"loss": 1.0}, step)
        first.add_values("validation", {"loss": 1.0}, step)
        first.add_image("picture", black, step)
    first.flush()
    for path in tmp_path.rglob("events.*"):  # readers go by the names, which begin with the second
        path.rename(path.with_name("events.out.tfevents.1000000000.earlier"))
    second = open_board(tmp_path, after=10)
    for part in ("train", "validation"):
        second.add_values(part, {"loss": 0.5}, 20)
    second.add_image("picture", white, 20)
    second.flush()
    for part in ("train", "validation"):
        folder = tmp_path / "tensorboard" / part
        assert points(folder, "pretrain/loss") == [(10, 1.0), (20, 0.5)]
    images = read(tmp_path / "tensorboard" / "validation").Images("pretrain_pictures/picture")
    assert [image.step for image in images] == [10, 20]
    assert images[0].encoded_image_string != images[1].encoded_image_string
    assert (images[0].width, images[0].height) == (6, 4)


def hyperparameters(folder: Path) -> dict[str, Any]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = read(folder).PluginTagToContent("hparams")["_hparams_/session_start_info"]
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def test_hyperparameters_are_written_once(tmp_path: Path) -> None:
    board = open_board(tmp_path)
    board.add_hyperparameters({"lr": 0.001, "is_small": True, "by": Path("x"), "num_labels": None})
    board.flush()
    resumed = open_board(tmp_path, after=5)
    resumed.add_hyperparameters({"lr": 0.5})
    resumed.flush()
    found = hyperparameters(tmp_path / "tensorboard")
    assert found == {"lr": 0.001, "is_small": True, "by": "x"}


def test_latent_space(tmp_path: Path) -> None:
    latent = np.arange(15, dtype=np.float32).reshape(5, 3)
    images = np.zeros((5, 28, 28), np.uint8)
    for _ in range(2):  # as when the last step is done again
        open_board(tmp_path).add_latent_space(latent, np.arange(5), images, 40)
    folder = tmp_path / "tensorboard" / "validation"
    config = (folder / "projector_config.pbtxt").read_text()
    assert config.count("embeddings {") == 1
    assert "pretrain latent space" in config
    (below,) = folder.glob("00040/*")
    assert np.array_equal(np.loadtxt(below / "tensors.tsv"), latent)
    assert (below / "metadata.tsv").read_text().split() == list("01234")
