"""The page computes what the trained model computes: its scripts are run by node."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megakit.training.classifier import Predictions
from mnist import files as mnist_files
from mnist.figure_style import percent
from mnist.training_form import to_training_form
from tests.left_behind import run_javascript
from tests.mnist.report.pages import (
    SHIM,
    Trained,
    headings,
    notes,
    page_of,
    scripts_of,
)

pytestmark = pytest.mark.usefixtures("megatron")


def assert_same(page: str, predictions: Predictions, images: NDArray[np.uint8]) -> None:
    """The page's own script computes what the model computes in torch."""
    model, scripts = scripts_of(page)
    given = {"model": model, "images": images.reshape(len(images), -1).tolist()}
    found = run_javascript(f"{SHIM} {scripts} result = given.images.map(classify);", given)
    for key in ("probabilities", "latent"):
        values = getattr(predictions, key)
        if values is None:
            assert not any(key in each for each in found)
        else:
            rows = values[: len(images)]
            assert np.allclose([each[key] for each in found], rows, atol=1e-4)


def test_of_the_tutorial(page: str, trained: Trained) -> None:
    assert len(set(trained.predictions.prediction.tolist())) == 10  # else little is tested
    assert_same(page, trained.predictions, trained.images[:60])


def test_a_probability_reads_as_on_the_console(page: str) -> None:
    model, scripts = scripts_of(page)
    shares = [0.0, 0.0006, 0.99, 0.999, 0.9996, 1.0]
    given = {"model": model, "shares": shares}
    found = run_javascript(f"{SHIM} {scripts} result = given.shares.map(percent);", given)
    assert found == ["0.0%", "0.0%", "99.0%", "99.9%", "99.9%", "100.0%"]
    assert found == [percent(share) for share in shares]


def test_of_a_classifier_without_latents(tmp_path: Path) -> None:
    from tests.mnist.variants import WithoutLatentsConfig

    page, predictions = page_of(WithoutLatentsConfig(seed=1).configure_model(), tmp_path)
    assert headings(page)[0] == "Draw a digit"
    assert 'id="latents"' not in page
    assert_same(page, predictions, mnist_files.read_digits("test")[0][:20])


def test_a_model_that_differs_from_its_predictions(trained: Trained, tmp_path: Path) -> None:
    """One image is enough; it is named."""
    probabilities = trained.predictions.probabilities.copy()
    row = int(probabilities.max(axis=1).argmax())
    probabilities[row] = np.roll(probabilities[row], 1)
    page, _ = page_of(trained.model, tmp_path, probabilities=probabilities)
    assert "Draw a digit" not in page
    traced = trained.predictions.prediction[row]
    assert notes(page)[0].startswith(
        "Left out: the canvas, because the traced model and predictions.csv disagree on "
        f"1 of 300 images. The first is idx {row}: {traced}, not {(traced + 1) % 10}."
    )


def test_the_page_converts_drawings_nearly_as_python_does(page: str, trained: Trained) -> None:
    model, scripts = scripts_of(page)
    drawings = [255 - image.repeat(10, 0).repeat(10, 1) for image in trained.images[:10]]
    found = run_javascript(
        f"{SHIM} {scripts} const form = (p) => toTrainingForm(Uint8Array.from(p), 280);"
        "result = given.drawings.map(form).map((image) => Array.from(image));",
        {"model": model, "drawings": [drawing.ravel().tolist() for drawing in drawings]},
    )
    expected = np.array([to_training_form(drawing).ravel() for drawing in drawings], int)
    assert np.abs(np.array(found) - expected).mean() < 2
