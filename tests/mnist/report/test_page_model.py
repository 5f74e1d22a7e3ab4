"""The page computes what the trained model computes: its scripts are run by node."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mnist import files as mnist_files
from mnist.training_form import to_training_form
from tests.left_behind import run_javascript
from tests.mnist.report.pages import (
    SHIM,
    Trained,
    assert_same,
    headings,
    notes,
    page_of,
    scripts_of,
)

pytestmark = pytest.mark.usefixtures("megatron")


def classify(page: str, images: NDArray[np.uint8]) -> Any:
    """Classifies images by the page's own script."""
    model, scripts = scripts_of(page)
    given = {"model": model, "images": images.reshape(len(images), -1).tolist()}
    return run_javascript(f"{SHIM} {scripts} result = given.images.map(classify);", given)


class TestTheModelOfThePage:
    """It is traced from the model's class: whatever that computes, the page does."""

    def test_of_the_tutorial(self, page: str, trained: Trained) -> None:
        assert len(set(trained.predictions.prediction.tolist())) == 10  # else little is tested
        found = classify(page, trained.images[:60])
        assert_same(found, trained.predictions, 60)

    @pytest.mark.parametrize("variant", ["layer", "GELU", "without latents"])
    def test_of_readers(self, variant: str, tmp_path: Path) -> None:
        from tests.mnist.variants import VariantConfig, WithoutLatentsConfig

        if variant == "without latents":
            model: Any = WithoutLatentsConfig(seed=1).configure_model()
        else:
            model = VariantConfig(seed=1, variant=variant).configure_model()
        page, predictions = page_of(model, tmp_path)
        assert headings(page)[0] == "Draw a digit"
        assert ('id="latents"' in page) == (predictions.latent is not None)
        images, _ = mnist_files.read_digits("test")
        assert_same(classify(page, images[:20]), predictions, 20)

    @pytest.mark.parametrize(
        ("variant", "note"),
        [
            ("convolution", "the operation conv1d(unsqueeze, convolution_weight, "),
            ("branch", "Variant cannot be traced: GuardOnDataDependentSymNode"),
        ],
    )
    def test_an_unknown_operation_is_named(self, variant: str, note: str, tmp_path: Path) -> None:
        from tests.mnist.variants import VariantConfig

        model = VariantConfig(seed=1, variant=variant).configure_model()
        page, _ = page_of(model, tmp_path)
        assert headings(page)[:2] == ["Latent space", "Training"]
        assert "readGraph" not in page
        assert 'id="latents"' in page
        assert notes(page)[0].startswith(f"Left out: the canvas, because {note}")
        page, _ = page_of(model, tmp_path / "without", latent=None)
        assert headings(page)[0] == "Training"

    def test_a_model_that_differs_from_its_predictions(
        self, trained: Trained, tmp_path: Path
    ) -> None:
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
