"""The report is found among runs and written, and says what is left out."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from mnist.report_frame import picture

from megakit.checkpoints.manifest import read_manifest, write_manifest
from mnist import report as digit_report
from tests.mnist.report.pages import Trained, headings


def test_reconstructions_are_those_of_the_model(trained: Trained) -> None:
    restored = digit_report.reconstruct(trained.pretrained, trained.images)
    import torch

    with torch.no_grad():
        x = torch.from_numpy(trained.images).unsqueeze(1).float() / 255
        expected = trained.autoencoder(x)["x_hat"].reshape(-1, 28, 28).clip(0, 1).numpy() * 255
    assert np.abs(restored - expected).max() <= 0.51


def test_each_part_shows_what_its_title_says(page: str, trained: Trained) -> None:
    assert "Left out" not in page
    assert len(re.findall(r">[^<]*Draw a digit", page)) == 1
    predictions = trained.predictions
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    scores = predictions.scores()
    assert facts == {
        "accuracy": f"{scores['accuracy']:.2%}",
        "cross entropy": f"{scores['cross_entropy']:.4f}",
        "test images (digits)": "300",
        "checkpoint": "finetune/step=000010",
    }
    _, _, curves = page.partition("<h3>Pretraining</h3>")
    first, _, second = curves.partition("<h3>Fine-tuning</h3>")
    assert "[0.25]" in first
    assert "[0.5]" in second.partition("</section>")[0]
    for digit in range(10):
        row = np.flatnonzero(predictions.label == digit)[0]
        image, found = trained.images[row], predictions.prediction[row]
        name = f"Test image of the digit {digit}, predicted as {found}"
        assert picture(image, name) in page
        assert picture(image, f"Digit {digit}, original") in page
        assert page.count(f"Digit {digit}, reconstruction") == 1
    wrong = np.flatnonzero(predictions.prediction != predictions.label)
    worst = wrong[np.argsort(-predictions.probabilities.max(axis=1)[wrong], kind="stable")][:25]
    shown = re.findall(r"<b>(\d)</b> as <b class=wrong>(\d)</b>", page)
    expected = zip(predictions.label[worst], predictions.prediction[worst], strict=True)
    assert shown == [(str(label), str(prediction)) for label, prediction in expected]
    assert len(set(shown)) > 3  # else little is compared


def test_the_page_says_what_is_gone(trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(trained.runs / "finetune", tmp_path / "runs" / "finetune")
    checkpoint = tmp_path / "runs" / "finetune" / "checkpoints" / "step=000010"
    (tmp_path / "runs" / "finetune" / "metrics.csv").unlink()
    path = tmp_path / "report.html"
    digit_report.write_digit_report(path, trained.predictions, trained.images, checkpoint, "digits")
    text = path.read_text("utf-8")
    assert headings(text) == ["Draw a digit", "Confusion matrix", "Most confident mistakes"]
    assert re.findall(r"<p class=note>Left out: (.*?) because", text) == [
        "pretraining&#39;s curves and reconstructions,",
        "the curves of fine-tuning,",
    ]


def test_a_fresh_start_and_a_damaged_one(trained: Trained, tmp_path: Path) -> None:
    notes: list[str] = []
    assert digit_report.find_pretraining(trained.pretrained, notes) is None
    assert "random weights" in notes[0]
    runs = shutil.copytree(trained.runs, tmp_path / "runs")
    classifier = runs / trained.classifier.relative_to(trained.runs)
    for name in ("a", "pretrain", "z"):  # other runs
        other = shutil.copytree(runs / "pretrain.1", runs / name) / "checkpoints/step=000010"
        write_manifest(other, replace(read_manifest(other), dataset=name))
    pretrained = runs / trained.pretrained.relative_to(trained.runs)
    assert digit_report.find_pretraining(classifier, notes) == pretrained
    file = next((runs / "pretrain.1").rglob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert digit_report.find_pretraining(classifier, notes) is None
    assert "no longer contains" in notes[-1]
