"""The page shows what its titles say, says what is left out, and computes what the model does."""

import base64
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from megakit.checkpoints.manifest import read_manifest
from megakit.errors import UserError
from mnist.figure_style import percent
from mnist.own_pictures import to_training_form
from mnist.report import TEMPLATE, find_pretraining, reconstruct
from tests.left_behind import run_javascript
from tests.mnist.report.pages import Trained, data_of, headings, notes, page_of

pytestmark = pytest.mark.usefixtures("megatron")


def test_each_part_is_shown_and_nothing_is_opened(page: Path, trained: Trained) -> None:
    text = page.read_text("utf-8")
    assert notes(text) == []
    assert headings(text) == [
        *("Draw a digit", "Training", "Reconstructions", "Confusion matrix"),
        "Most confident mistakes",
    ]
    scores = trained.predictions.scores()
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)) == {
        "accuracy": f"{scores['accuracy']:.2%}",
        "cross entropy": f"{scores['cross_entropy']:.4f}",
        "test images (digits)": "300",
        "checkpoint": "finetune/step=000010",
    }
    pictures = re.findall(r'<img src="data:image/png;base64,(.*?)" *\n? *alt="(.*?)">', text)
    shown = {base64.b64decode(content): name for content, name in pictures}
    for name in ("confusion_matrix", "latent_space", "mistakes"):
        assert (page.parent / f"{name}.png").read_bytes() in shown
    worst = trained.predictions.mistakes()
    named = [f"{a} as {b}" for a, b in zip(worst.label, worst.prediction, strict=True)]
    assert shown[(page.parent / "mistakes.png").read_bytes()].strip() == ", ".join(named)
    assert len(pictures) == 10 + 3 + 2 + 2  # test images, predictions, curves, reconstructions
    assert "default-src 'none'" in text
    without_scripts = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    addresses = re.findall(r'(?:src|href|action)="([^"]*)"', without_scripts)
    assert {each[:5] for each in addresses} == {"#resu", "data:"}


def test_the_script_computes_what_the_model_computes(page: Path, trained: Trained) -> None:
    """In node. Drawings are converted nearly as `--input` does, probabilities read as there."""
    assert len({*trained.predictions.prediction.tolist()}) == 10  # else little is tested
    shares = [0.0, 0.0006, 0.99, 0.999, 0.9996, 1.0]
    drawings = [
        np.uint8(255) * (image < 128).repeat(10, 0).repeat(10, 1) for image in trained.images[:10]
    ]
    shim = """
      const anything = new Proxy(function () {}, { get: () => anything, apply: () => anything });
      const document = {
        getElementById: (name) => (name === "data" ? { textContent: given.data } : anything),
        querySelectorAll: () => [],
      };
    """
    given = {
        "data": json.dumps(data_of(page.read_text("utf-8")) | {"space": None}),
        "images": trained.images[:60].reshape(60, -1).tolist(),
        "drawings": [drawing.ravel().tolist() for drawing in drawings],
        "shares": shares,
    }
    found = run_javascript(
        f"{shim} {TEMPLATE.with_suffix('.js').read_text('utf-8')}"
        "result = { answers: given.images.map(classify), percents: given.shares.map(percent),"
        "  forms: given.drawings.map((drawing) => toTrainingForm(drawing, 280)) };",
        given,
    )
    for name in ("probabilities", "latent"):
        values = [answer[name] for answer in found["answers"]]
        assert np.allclose(values, getattr(trained.predictions, name)[:60], atol=1e-4)
    assert found["percents"] == [percent(share) for share in shares]
    expected = np.array([to_training_form(drawing).ravel() for drawing in drawings], int)
    assert np.abs(np.array(found["forms"]) - expected).mean() < 6


def test_only_a_chain_of_linear_and_relu_layers_has_a_canvas(
    trained: Trained, tmp_path: Path
) -> None:
    """Other layers have none, nor the same layers that compute something else."""
    from tests.mnist.variants import DoubledConfig, WithoutLatentsConfig, WithTanhConfig

    page = page_of(WithoutLatentsConfig(seed=1).configure_model(), tmp_path / "chain")
    assert headings(page) == ["Draw a digit", "Training"]  # no pictures are beside it
    assert data_of(page)["space"] is None
    assert "(&lt;digits&gt;)" in page
    for config in (DoubledConfig(seed=1), WithTanhConfig(seed=1)):
        model = config.configure_model()
        model.load_state_dict(trained.model.state_dict())
        page = page_of(model, tmp_path / type(model).__name__)
        assert headings(page) == ["Latent space", "Training"]
        assert notes(page)[0].startswith("This page has no canvas")


def test_pretraining_is_found_among_all_runs(trained: Trained, tmp_path: Path) -> None:
    runs = shutil.copytree(trained.runs, tmp_path / "runs")
    shutil.copytree(runs / "finetune", runs / "a")
    classifier = runs / trained.classifier.relative_to(trained.runs)
    pretrained = find_pretraining(classifier)
    assert read_manifest(pretrained).digest == read_manifest(trained.pretrained).digest
    (pretrained / "manifest.json").write_text("damaged")
    with pytest.raises(UserError, match="does not contain the classifier's start checkpoint"):
        find_pretraining(classifier)


def test_reconstructions_are_those_of_the_model(trained: Trained) -> None:
    import torch

    with torch.no_grad():
        x = torch.from_numpy(trained.images).unsqueeze(1).float() / 255
        expected = trained.autoencoder(x)["x_hat"].reshape(-1, 28, 28).clip(0, 1).numpy() * 255
    restored = reconstruct(trained.pretrained, trained.images)
    assert np.abs(restored - expected).max() <= 0.51
