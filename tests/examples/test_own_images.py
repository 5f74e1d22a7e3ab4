"""Images in folders: the dataset keeps the rules, mistakes are told, and the scripts run."""

import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from examples.own_images.image_dataset import FolderImages
from examples.own_images.image_files import FolderOptions
from megakit.errors import UserError
from megakit.testing import assert_dataset_compatible_with_megatron
from tests.scripts import accuracy, read_csv, run_python, run_script


@pytest.fixture(scope="module")
def components(megatron: None) -> ModuleType:
    from examples.own_images import image_components

    return image_components


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of images in several forms: sizes, grey, transparent."""
    rng = np.random.default_rng(0)
    forms = {"L": (20, 30), "RGB": (32, 32, 3), "RGBA": (9, 9, 4)}
    for split in ("train", "val", "test"):
        for name in ("cat", "dog"):
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for mode, shape in forms.items():
                pixels = rng.integers(0, 256, shape, np.uint8)
                Image.fromarray(pixels).save(place / f"{mode}.png")
    return tmp_path


def problems(folder: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        FolderOptions(data_dir=folder).resolve_dataset(None, print)
    return caught.value.problems


def test_the_dataset_keeps_the_rules(components: ModuleType, folder: Path) -> None:
    assert_dataset_compatible_with_megatron(FolderImages(folder, "train"))
    data = components.FolderDataModule(folder, 2, 4)
    data.setup("fit")
    assert_dataset_compatible_with_megatron(data.train_set)
    assert len(data.train_set) == 6


def test_items(folder: Path) -> None:
    images = FolderImages(folder, "train")
    items = [images[index] for index in range(len(images))]
    assert [item["label"] for item in items] == [0, 0, 0, 1, 1, 1]
    assert [item["idx"] for item in items] == list(range(6))
    assert images[-1]["idx"] == 5
    with pytest.raises(IndexError):
        images[6]
    assert {item["data"].shape for item in items} == {(3, 32, 32)}
    assert all(0 <= item["data"].min() < item["data"].max() <= 1 for item in items)
    with Image.open(folder / "train" / "dog" / "RGB.png") as image:
        expected = torch.from_numpy(np.asarray(image) / np.float32(255))
    assert torch.equal(images[4]["data"].movedim(0, 2), expected)


def test_a_split_may_lack_a_class(folder: Path) -> None:
    for path in (folder / "test" / "cat").iterdir():
        path.unlink()
    (folder / "test" / "cat").rmdir()
    FolderOptions(data_dir=folder).resolve_dataset(None, print)
    test = FolderImages(folder, "test")
    assert {test[index]["label"] for index in range(len(test))} == {1}


def test_other_images_are_another_dataset(folder: Path) -> None:
    def name() -> str:
        return FolderOptions(data_dir=folder).resolve_dataset(None, print)

    before = name()
    assert name() == before
    (folder / "val" / "dog" / "L.png").unlink()
    assert name() != before


def test_all_that_is_wrong_with_folders_is_told_at_once(folder: Path) -> None:
    for path in (folder / "val").glob("*/*"):
        path.rename(path.with_suffix(".txt"))
    bird = folder / "test" / "bird"
    bird.mkdir()
    (folder / "test" / "cat" / "L.png").rename(bird / "L.png")
    empty, unknown = problems(folder)
    assert empty.startswith(f"{folder / 'val'}: contains no images")
    assert unknown.startswith(f"{folder / 'test'}: has classes that {folder / 'train'} lacks: bi")
    assert len(problems(folder / "nowhere")) == 3


def test_files_that_cannot_be_read(folder: Path) -> None:
    """RefusedError before anything starts or, where they change later, when they are needed."""
    place = folder / "train" / "cat"
    dataset = FolderOptions(data_dir=folder).resolve_dataset(None, print)
    images = FolderImages(folder, "train")
    (place / "L.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"L\.png: cannot be read \(neither PNG"):
        images[0]
    with pytest.raises(UserError, match="changed since this command began"):
        FolderOptions(data_dir=folder).check_unchanged(dataset)
    os.mkfifo(place / "a.png")
    (place / "b.png").symlink_to("/dev/zero")
    (place / "c.png").mkdir()
    (place / "d.png").symlink_to("nowhere")
    reasons = [*["not a regular file"] * 3, "No such file or directory"]
    expected = [
        f"{place / name}.png: cannot be read ({reason})."
        for name, reason in zip("abcd", reasons, strict=True)
    ]
    found = problems(folder)
    assert [problem.partition(" Copy")[0] for problem in found] == expected


def test_names_need_not_be_utf8(folder: Path) -> None:
    (folder / "train" / "cat" / "L.png").rename(folder / "train" / "cat" / "caf\udce9.png")
    assert FolderOptions(data_dir=folder).resolve_dataset(None, print).startswith("images-")


@pytest.mark.long
def test_the_command_that_checks_the_dataset(folder: Path, tmp_path: Path) -> None:
    """As the README has it; in a fresh interpreter, in which nothing was set up for a CPU."""
    (tmp_path / "sample-images").symlink_to(folder)
    factory = "examples.own_images.image_dataset:training_images"
    done = run_python("-m", "megakit.testing", factory, cwd=tmp_path)
    assert "keeps the rules (6 samples)" in done.output()


def val_loss_of(folder: Path, *options: object) -> float:
    """The validation loss after a step of training on some images."""
    common = ("--data-dir", folder, "--output-dir", folder.parent / "runs", "--fresh")
    short = ("--max-steps", 1, "--global-batch-size", 4, "--micro-batch-size", 2)
    run_script(
        "examples/own_images/model_train.py",
        *(*common, *short, *options, "--accelerator", "cpu", "--precision", "32"),
    ).output()
    return float(read_csv(folder.parent / "runs" / "train" / "metrics.csv")[-1]["val_loss"])


@pytest.mark.long
def test_validation_can_be_limited(folder: Path) -> None:
    """To the first global batch: as if there were no other images."""
    data = folder / "images"
    data.mkdir()
    for split in ("train", "val", "test"):
        (folder / split).rename(data / split)
    limited = val_loss_of(data, "--limit-val-batches", 1)
    for path in sorted((data / "val").glob("*/*"))[4:]:
        path.unlink()
    assert val_loss_of(data) == limited


@pytest.mark.long
def test_the_sample_is_learned(tmp_path: Path) -> None:
    common = (
        *("--data-dir", tmp_path / "images", "--output-dir", tmp_path, "--accelerator", "cpu"),
        # Where the processor lacks AVX-512, a convolution in bf16 takes ten times as long.
        *("--precision", "32"),
    )
    for script, *options in (
        ("make_sample.py", tmp_path / "images"),
        ("model_train.py", *common),
        ("model_predict.py", *common, "--devices", 2, "--tensor-parallel", 2),
    ):
        result = run_script(f"examples/own_images/{script}", *options).output()
    predictions = Path(result.strip())
    assert [int(row["idx"]) for row in read_csv(predictions)] == list(range(300))
    assert accuracy(predictions) > 0.8


def test_without_images_nothing_begins(tmp_path: Path) -> None:
    result = run_script(
        *("examples/own_images/model_train.py", "--data-dir", tmp_path / "none"),
        *("--output-dir", tmp_path / "runs"),
    )
    assert result.status == 2
    assert len(result.err.splitlines()) == 3
    assert not list(tmp_path.iterdir())
