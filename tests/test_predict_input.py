"""Predicting a user's own pictures, from the command line to the files that are left."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mnist import files as mnist_files
from tests.scripts import REPOSITORY, accuracy, read_csv, read_json, run_script

pytestmark = pytest.mark.long

FIGURES = {"confusion_matrix.png", "mistakes.png", "latent_space.png"}


def train(runs: Path, pretrain_steps: int, finetune_steps: int, *arguments: object) -> None:
    for script, steps in (("pretrain", pretrain_steps), ("finetune", finetune_steps)):
        given = ("--output-dir", runs, "--max-steps", steps, *arguments)
        run_script(f"model_{script}.py", *given).output()


def predict(runs: Path, *arguments: object) -> str:
    """What the script says; it has to end well."""
    result = run_script("model_predict.py", "--output-dir", runs, *arguments)
    assert result.status == 0, result.err
    return result.err


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of the bundled digits that has learned a little, and its predictions."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, 20, 20, "--dataset", "digits")
    predict(folder, "--dataset", "digits", "--precision", "32")
    return folder


@pytest.fixture(scope="module")
def test_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test images as files, whose names sort as they do and are not safe in a table."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, image in enumerate(mnist_files.read_digits("test")[0]):
        Image.fromarray(image).save(folder / f'{number:03}, "scan".png')
    return folder


def without(rows: list[dict[str, str]], *columns: str) -> list[dict[str, str]]:
    return [{name: row[name] for name in row if name not in columns} for row in rows]


def test_figures_of_the_test_set(runs: Path) -> None:
    """The same under a pipeline, whose second stage gets latents from the first."""
    drawn = {path.name: path.read_bytes() for path in (runs / "predict").glob("*.png")}
    assert drawn.keys() == FIGURES
    said = predict(
        runs,
        *("--dataset", "digits", "--precision", "32"),
        "--devices",
        2,
        "--pipeline-parallel",
        2,
    )
    assert all(name in said for name in FIGURES)
    for name, content in drawn.items():
        assert (runs / "predict" / name).read_bytes() == content


@pytest.mark.parametrize("layout", [(), ("--devices", 2, "--micro-batch-size", 7)])
def test_pictures_get_what_the_same_images_get(
    runs: Path, test_images: Path, layout: tuple[object, ...]
) -> None:
    predict(runs, "--input", test_images, "--precision", "32", *layout)
    own = read_csv(runs / "predict-input" / "predictions.csv")
    plain = read_csv(runs / "predict" / "predictions.csv")
    assert list(own[0]) == ["idx", "source", *list(plain[0])[1:]]
    assert [row["source"] for row in own] == sorted(path.name for path in test_images.iterdir())
    assert {row["label"] for row in own} == {""}
    shares = [f"p{number}" for number in range(10)]
    assert without(own, "source", "label", *shares) == without(plain, "label", *shares)
    for name in shares:
        expected = [float(row[name]) for row in plain]
        assert np.allclose([float(row[name]) for row in own], expected, atol=1e-5)
    assert {path.name for path in (runs / "predict-input").iterdir()} == {
        *("predictions.csv", "summary.json", "log.txt", ".lock", "inputs.png")
    }
    summary = read_json(runs / "predict-input" / "summary.json")
    assert summary["num_samples"] == 300
    assert {summary[name] for name in ("accuracy", "cross_entropy", "per_class_accuracy")} == {None}
    assert summary["dataset"].startswith(f"{test_images} (sha256 ")


def test_a_single_picture(runs: Path, test_images: Path, tmp_path: Path) -> None:
    """Its answer is said as well; no data set has to be there for it."""
    image = np.asarray(Image.open(min(test_images.iterdir())))
    Image.fromarray(255 - image).resize((200, 200)).save(tmp_path / "seven.jpg")
    said = predict(runs, "--input", tmp_path / "seven.jpg", "--data-dir", tmp_path / "nowhere")
    (row,) = read_csv(runs / "predict-input" / "predictions.csv")
    assert f"seven.jpg    {row['prediction']}, " in said
    for kind in ("inverted, because the ink was dark", "scaled to fit 20x20"):
        assert f"1 of 1 pictures: {kind}" in said
    assert "trained on digits" in said
    assert not (tmp_path / "nowhere").exists()


def draw_in_three_ways(image: np.ndarray, folder: Path, name: str) -> None:
    """As it is; large and black on nothing; and grey on white paper, off its middle, as JPEG."""
    Image.fromarray(image).save(folder / f"as-it-is {name}.png")
    large = np.asarray(Image.fromarray(image).resize((100, 100), Image.Resampling.BICUBIC))
    nothing = np.zeros_like(large)
    transparent = np.stack([nothing, nothing, nothing, large], axis=-1)
    Image.fromarray(transparent).save(folder / f"transparent {name}.png")
    page = np.full((160, 120), 240)
    page[40:140, 10:110] -= large // 4 * 3
    Image.fromarray(page.astype(np.uint8)).save(folder / f"on-paper {name}.jpg", quality=75)


@pytest.fixture(scope="module")
def mnist_runs(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of MNIST that has learned enough, and its predictions."""
    runs = tmp_path_factory.mktemp("mnist-runs")
    train(runs, 300, 600, "--data-dir", mnist_dir)
    predict(runs, "--data-dir", mnist_dir)
    return runs


def shares_right(runs: Path, labels: np.ndarray) -> dict[str, float]:
    """The share of right answers by kind; a file is named by its kind and the image's number."""
    right: dict[str, list[bool]] = {}
    for row in read_csv(runs / "predict-input" / "predictions.csv"):
        kind, _, name = row["source"].rpartition(" ")
        answers = right.setdefault(kind, [])
        answers.append(int(row["prediction"]) == labels[int(Path(name).stem)])
    return {kind: float(np.mean(answers)) for kind, answers in right.items()}


def test_pictures_of_all_kinds_are_read_as_well(
    mnist_dir: Path, mnist_runs: Path, tmp_path: Path
) -> None:
    """Within two points of the accuracy on the same images as they are."""
    images, labels = mnist_files.read_mnist(mnist_dir, train=False)
    for number in range(200):
        draw_in_three_ways(images[number], tmp_path, f"{number:03}")
    assert "trained on digits" not in predict(mnist_runs, "--input", tmp_path)

    assert accuracy(mnist_runs / "predict" / "predictions.csv") > 0.85
    shares = shares_right(mnist_runs, labels)
    assert shares.keys() == {"as-it-is", "transparent", "on-paper"}
    assert min(shares.values()) >= shares["as-it-is"] - 0.02, shares


def test_photos_of_every_kind_are_read(
    mnist_dir: Path, mnist_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 digits for each kind; the benchmark has 100, and a classifier that learned more."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    photos = importlib.import_module("photos")
    digits = photos.Digits(mnist_dir, 40, seed=2)
    digits.write(tmp_path)
    predict(mnist_runs, "--input", tmp_path)
    right = photos.number_right(mnist_runs, digits)
    assert right.keys() == {photos.UNCHANGED, *photos.KINDS}
    assert min(right.values()) >= right[photos.UNCHANGED] - 5, right
