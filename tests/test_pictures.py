"""Predicting a user's own pictures, from the command line to the files that are left.

tests/test_readme.py has pictures and photos of MNIST's images.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mnist import files as mnist_files
from tests.left_behind import LOCK
from tests.once import Chain
from tests.scripts import read_csv, read_json, run_script
from tests.test_chain import probabilities

FIGURES = {"confusion_matrix.png", "latent_space.png", "mistakes.png"}


def test_a_folder_of_photos(chain: Chain, tmp_path: Path):
    """Blank photos and other files are skipped; at most 20 answers are printed.

    No figure of an earlier prediction stays: without labels, a prediction draws none.
    """
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
        "23 of 23 pictures: uneven light and noise of the paper removed.",
        "Skipped 1 of 25 files, which contain no ink: blank.png.",
        "Skipped 1 of 25 files, which cannot be read: list.txt.",
        "and          3 more in predictions.csv",
        "trained on digits",
    ):
        assert said in result.err
    answers = [f"{row['source']:11}  {row['prediction']}, probability" for row in rows]
    assert [answer in result.err for answer in answers] == [True] * 20 + [False] * 3
    drawn = Image.open(folder / "inputs.png")
    assert drawn.height > 4 * 140 > drawn.height / 2
    assert {path.name for path in folder.iterdir()} == {
        *("predictions.csv", "summary.json", "log.txt", LOCK, "notes.txt", "inputs.png")
    }


@pytest.mark.long
def test_pictures_get_what_the_same_images_get(chain: Chain, tmp_path: Path):
    """And the figures of the test set are the same under a pipeline, whose second stage gets
    latents from the first.
    """
    common = ("--output-dir", shutil.copytree(chain.runs, tmp_path / "runs"), "--precision", 32)
    run_script("model_predict.py", *common).output()
    folder = tmp_path / "runs" / "predict"
    plain = read_csv(folder / "predictions.csv")
    drawn = {name: (folder / name).read_bytes() for name in FIGURES}
    run_script("model_predict.py", *common, "--devices", 2, "--pipeline-parallel", 2).output()
    assert drawn == {name: (folder / name).read_bytes() for name in FIGURES}

    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number, image in enumerate(mnist_files.read_digits("test")[0]):
        Image.fromarray(image).save(pictures / f'{number:03}, "scan".png')
    layout = ("--devices", 2, "--micro-batch-size", 7)
    run_script("model_predict.py", *common, *layout, "--input", pictures).output()
    folder = tmp_path / "runs" / "predict-input"
    own = read_csv(folder / "predictions.csv")
    assert list(own[0]) == ["idx", "source", *list(plain[0])[1:]]
    assert [row["source"] for row in own] == sorted(path.name for path in pictures.iterdir())
    assert {row["label"] for row in own} == {""}
    assert [row["prediction"] for row in own] == [row["prediction"] for row in plain]
    assert np.allclose(probabilities(own), probabilities(plain), atol=1e-5)
    summary = read_json(folder / "summary.json")
    assert summary["num_samples"] == 300
    assert {summary[name] for name in ("accuracy", "cross_entropy", "per_class_accuracy")} == {None}
    assert summary["dataset"].startswith(f"{pictures} (sha256 ")
