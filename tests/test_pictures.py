"""Predicting a user's own pictures, from the command line to the files that are left.

tests/test_readme.py has pictures and photos of MNIST's images.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mnist import files as mnist_files
from mnist.figure_style import percent
from tests.left_behind import LOCK
from tests.once import Chain
from tests.scripts import read_csv, run_script

FIGURES = {"confusion_matrix.png", "latent_space.png", "mistakes.png"}


def test_a_folder_of_photos(chain: Chain, tmp_path: Path):
    """Blank photos and other files are skipped; no figure of an earlier prediction stays."""
    runs = Path(shutil.copytree(chain.runs, tmp_path / "runs"))
    photos = tmp_path / "photos"
    photos.mkdir()
    images = mnist_files.read_digits("test")[0][:23]
    light = np.linspace(1, 0.6, 280)
    for number, image in enumerate(images):
        photo = (230 - 0.7 * image.repeat(10, 0).repeat(10, 1)) * light
        suffix = (".jpg", ".png", ".webp")[number % 3]
        Image.fromarray(photo.astype(np.uint8)).save(photos / f"{number:02}{suffix}")
    Image.new("L", (200, 200), 230).save(photos / "blank.png")
    (photos / "list.txt").write_text("of the photos")
    folder = runs / "predict-input"
    folder.mkdir()
    for name in (*FIGURES, "report.html"):
        (folder / name).write_text("of an earlier prediction")
    (folder / "notes.txt").write_text("of the user")
    result = run_script("model_predict.py", "--input", photos, "--output-dir", runs)
    assert result.status == 0, result.err
    rows = read_csv(folder / "predictions.csv")
    assert [row["source"][:2] for row in rows] == [f"{number:02}" for number in range(23)]
    for said in (
        "Pictures converted to the form of MNIST: 23 of 23.",
        "Skipped, no picture or no ink: blank.png, list.txt",
        "and          3 more in predictions.csv",
        "trained on digits",
    ):
        assert said in result.err
    told = dict(re.findall(r"(\d\d\.\w+) +(\d, probability [\d.]+%(?: \?)?)\n", result.err))
    for row in rows[:20]:
        share = max(float(row[f"p{digit}"]) for digit in range(10))
        assert told.pop(row["source"]) == (
            f"{row['prediction']}, probability {percent(share)}{' ?' if share < 0.7 else ''}"
        )
    assert not told
    assert {row["label"] for row in rows} == {""}
    assert {path.name for path in folder.iterdir()} == {
        *("predictions.csv", "summary.json", "log.txt", LOCK, "notes.txt", "inputs.png")
    }


@pytest.mark.long
def test_pictures_get_what_the_same_images_get(chain: Chain, tmp_path: Path):
    runs, pictures = Path(shutil.copytree(chain.runs, tmp_path / "runs")), tmp_path / "pictures"
    pictures.mkdir()
    for number, image in enumerate(mnist_files.read_digits("test")[0]):
        Image.fromarray(image).save(pictures / f'{number:03}, "scan".png')
    options = ("--output-dir", runs, "--devices", 2, "--micro-batch-size", 7)
    run_script("model_predict.py", *options, "--input", pictures).output()
    folders = (runs / "predict-input", runs / "predict")
    own, plain = (read_csv(folder / "predictions.csv") for folder in folders)
    assert [row["source"] for row in own] == sorted(path.name for path in pictures.iterdir())
    same = [a["prediction"] == b["prediction"] for a, b in zip(own, plain, strict=True)]
    assert np.mean(same) > 0.98  # the scripts may compute in bfloat16
