"""Images in folders: the dataset keeps the rules, mistakes are told, and the scripts run."""

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
from tests.scripts import accuracy, read_csv, run_script


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
        FolderOptions(data_dir=folder).fingerprint()
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
    dataset = FolderOptions(data_dir=folder).fingerprint()
    images = FolderImages(folder, "train")
    (place / "L.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"L\.png: cannot be read \(Unidentified"):
        images[0]
    with pytest.raises(UserError, match="changed since this command began"):
        FolderOptions(data_dir=folder).check_unchanged(dataset)


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
