"""The page computes what the trained model computes: run by node, and by numpy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megakit.reporting.predictions import Predictions
from mnist import files as mnist_files
from mnist import report as digit_report
from tests.javascript import run_javascript
from tests.megakit.models.interpreter import interpret_in_numpy, softmax
from tests.mnist.report.pages import (
    SHIM,
    Trained,
    assert_same,
    formed,
    given_pictures,
    headings,
    notes,
    page_of,
    predict,
    scripts_of,
    strange_pictures,
)

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(params=["numpy", "JavaScript"])
def classify(request: pytest.FixtureRequest) -> Callable[[str, NDArray[np.uint8]], Any]:
    """Classifies images by the operations of a page: the page's script, or the same in numpy."""

    def run(page: str, images: NDArray[np.uint8]) -> Any:
        model, scripts = scripts_of(page)
        flat = images.reshape(len(images), -1)
        if request.param == "JavaScript":
            given = {"model": model, "images": flat.tolist()}
            return run_javascript(f"{SHIM} {scripts} result = given.images.map(classify);", given)
        return [
            {"probabilities": softmax(np.array([found.pop("logits")]))[0], **found}
            for found in interpret_in_numpy(model, flat / 255)
        ]

    return run


class TestTheModelOfThePage:
    """It is traced from the model's class: whatever that computes, the page does."""

    def test_of_the_tutorial(self, page: str, trained: Trained, classify: Any) -> None:
        assert len(set(trained.predictions.prediction.tolist())) == 10  # else little is tested
        found = classify(page, trained.images[:60])
        assert_same(found, trained.predictions, 60)

    @pytest.mark.parametrize("variant", ["plain", "layer", "Tanh", "GELU", "Sigmoid"])
    def test_of_readers(self, variant: str, tmp_path: Path, classify: Any) -> None:
        from tests.mnist.variants import VariantConfig

        model = VariantConfig(seed=1, variant=variant).configure_model()
        plain = VariantConfig(seed=1, variant="plain").configure_model()
        page, predictions = page_of(model, tmp_path)
        assert headings(page)[0] == "Draw a digit"
        images, _ = mnist_files.read_digits("test")
        assert_same(classify(page, images[:20]), predictions, 20)
        differs = np.abs(predictions.probabilities - predict(plain, images).probabilities).max()
        assert (differs > 0.001) == (variant != "plain")

    def test_without_latents(self, tmp_path: Path, classify: Any) -> None:
        from tests.mnist.variants import WithoutLatentsConfig

        model = WithoutLatentsConfig(seed=1).configure_model()
        page, predictions = page_of(model, tmp_path)
        assert headings(page)[0] == "Draw a digit"
        assert 'id="latents"' not in page
        assert "<title>Handwritten digits</title>" in page
        images, _ = mnist_files.read_digits("test")
        assert_same(classify(page, images[:20]), predictions, 20)

    @pytest.mark.parametrize(
        ("variant", "note"),
        [
            ("convolution", "the operation Conv1d (convolution) is not supported."),
            ("branch", "Variant cannot be traced: symbolically traced variables"),
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

    def test_a_layer_without_a_plain_form(
        self, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from megakit.models import plain

        monkeypatch.setattr(plain, "REPLACED", {})
        monkeypatch.setattr(plain, "FOREIGN", ("megakit",))
        page, _ = page_of(trained.model, tmp_path)
        assert "Draw a digit" not in page
        assert "cannot be replaced by torch layers: linear1" in notes(page)[0]

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

    def test_a_tie_is_no_difference(self) -> None:
        probabilities = np.array([[0.9, 0.1], [0.55, 0.45], [0.45, 0.55], [0.7, 0.3]])
        predictions = Predictions(np.arange(4), np.zeros(4, np.int64), probabilities)

        def differences(*classes: int) -> list[int]:
            return digit_report.find_differences(np.array(classes), predictions).tolist()

        assert differences(0, 0, 1, 0) == differences(0, 1, 0, 0) == []
        assert differences(0, 1, 0, 1) == [3]
        assert differences(1, 1, 0, 1) == [0, 3]


def test_the_page_converts_pictures_as_python_does(page: str) -> None:
    model, scripts = scripts_of(page)
    convert = (
        "({ pixels, height, width }) => toTrainingForm(Uint8Array.from(pixels), height, width)"
    )
    found = run_javascript(
        f"{SHIM} {scripts} const form = {convert};"
        "result = given.pictures.map(form).map((image) => image && Array.from(image));",
        {"model": model, "pictures": given_pictures()},
    )
    expected = [formed(picture) for picture in strange_pictures()]
    assert found == expected
    assert None in expected
