"""The tutorial's report: found among runs, written, and used in a real browser.

The classifier is trained for a moment in plain PyTorch, and saved as a run would save it.
"""

import base64
import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megakit.checkpoints.manifest import Manifest, list_files, write_manifest
from megakit.reporting.metrics import Metrics, MetricsFile
from megakit.reporting.predictions import Predictions
from mnist import files as mnist_files
from mnist import report as digit_report
from mnist.own_pictures import read_pictures, to_training_form
from tests.single_process import single_process

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def save(folder: Path, model: Any, stage: str, start: str | None) -> Path:
    """A checkpoint of a model in a run's folder, with a metrics.csv beside."""
    from megatron.core import dist_checkpointing

    checkpoint = folder / "checkpoints" / "step=000010"
    (checkpoint / "weights").mkdir(parents=True)
    state = model.sharded_state_dict(prefix="module.")
    dist_checkpointing.save(state, str(checkpoint / "weights"))
    name = type(model).__name__
    files = list_files(checkpoint)
    write_manifest(
        checkpoint, Manifest(stage, name, "digits", 10, run={"start": start}, files=files)
    )
    MetricsFile(folder / "metrics.csv").append(Metrics(10, 80, 0.5, 0.6, 1e-3))
    return checkpoint


@dataclass(frozen=True)
class Trained:
    runs: Path
    pretrained: Path
    classifier: Path
    images: NDArray[np.uint8]
    predictions: Predictions
    restored: NDArray[np.uint8]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An autoencoder, and a classifier of digits that was fitted for a second."""
    with single_process():
        import torch

        from megakit.checkpoints.manifest import read_manifest
        from model_components import ExampleFineTuneConfig, PretrainConfig

        runs = tmp_path_factory.mktemp("report") / "runs"
        autoencoder = PretrainConfig(seed=1).configure_model()
        pretrained = save(runs / "pretrain.1", autoencoder, "pretrain", None)
        model = ExampleFineTuneConfig(seed=1).configure_model()
        images, labels = map(torch.from_numpy, mnist_files.read_digits("train"))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(150):
            batch = torch.arange(64 * step, 64 * (step + 1)) % len(images)
            optimizer.zero_grad()
            logits = model(images[batch].unsqueeze(1).float() / 255)
            torch.nn.functional.cross_entropy(logits, labels[batch].long()).backward()
            optimizer.step()
        start = read_manifest(pretrained).digest
        classifier = save(runs / "finetune", model, "finetune", start)

        test_images, test_labels = mnist_files.read_digits("test")
        x = torch.from_numpy(test_images).unsqueeze(1).float() / 255
        with torch.no_grad():
            logits = model(x).numpy()
            restored = autoencoder(x)["x_hat"].reshape(-1, 28, 28).numpy()
        predictions = Predictions.from_logits(
            np.arange(len(x)), test_labels.astype(np.int64), logits
        )
    return Trained(runs, pretrained, classifier, test_images, predictions, restored)


@pytest.fixture(scope="module")
def page(trained: Trained) -> str:
    path = trained.runs / "report.html"
    digit_report.write_digit_report(
        path, trained.predictions, trained.images, trained.classifier, "digits"
    )
    return path.read_text("utf-8")


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


class TestWriting:
    def test_weights_are_those_of_the_model(self, trained: Trained) -> None:
        assert len(set(trained.predictions.prediction.tolist())) == 10  # else little is tested
        weights = digit_report.read_weights(trained.classifier)
        logits = digit_report.classify(weights, trained.images)
        assert (logits.argmax(axis=1) == trained.predictions.prediction).all()

    def test_reconstructions_are_those_of_the_model(self, trained: Trained) -> None:
        weights = digit_report.read_weights(trained.pretrained)
        restored = digit_report.decode(weights, digit_report.encode(weights, trained.images))
        expected = (trained.restored.clip(0, 1) * 255).round()
        assert np.abs(restored - expected).max() <= 1

    def test_everything_is_there(self, page: str) -> None:
        assert headings(page) == [
            *("Draw a digit", "Training", "Reconstructions", "Confusion matrix"),
            "Surest mistakes",
        ]
        assert re.findall(r"<h3>(.*?)</h3>", page) == ["Pretraining", "Fine-tuning"]
        assert "Left out" not in page

    def test_the_page_says_what_is_gone(self, trained: Trained, tmp_path: Path) -> None:
        shutil.copytree(trained.runs / "finetune", tmp_path / "runs" / "finetune")
        checkpoint = tmp_path / "runs" / "finetune" / "checkpoints" / "step=000010"
        (tmp_path / "runs" / "finetune" / "metrics.csv").unlink()
        path = tmp_path / "report.html"
        digit_report.write_digit_report(
            path, trained.predictions, trained.images, checkpoint, "digits"
        )
        text = path.read_text("utf-8")
        assert headings(text) == ["Draw a digit", "Confusion matrix", "Surest mistakes"]
        assert re.findall(r"<p class=note>Left out: (.*?) for", text) == [
            "pretraining&#x27;s curves and reconstructions,",
            "the curves of fine-tuning,",
        ]

    def test_a_fresh_start_and_a_damaged_one(self, trained: Trained, tmp_path: Path) -> None:
        notes: list[str] = []
        assert digit_report.find_pretraining(trained.pretrained, notes) is None
        assert "fresh weights" in notes[0]
        runs = shutil.copytree(trained.runs, tmp_path / "runs")
        classifier = runs / trained.classifier.relative_to(trained.runs)
        assert digit_report.find_pretraining(classifier, notes) is not None
        file = next((runs / "pretrain.1").rglob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1])
        assert digit_report.find_pretraining(classifier, notes) is None
        assert "not in" in notes[-1]


def strange_pictures() -> list[NDArray[np.uint8]]:
    """Of many sizes, dark on bright and bright on dark, with noise, and with next to nothing."""
    random = np.random.default_rng(0)
    pictures: list[NDArray[Any]] = []
    for height, width in [(28, 28), (5, 90), (90, 5), (61, 33), (33, 61), (20, 20), (1, 1), (3, 2)]:
        noise = random.integers(0, 256, (height, width)).astype(np.uint8)
        line = np.full((height, width), 250, np.uint8)
        line[height // 3 : height // 2 + 1, width // 4 : width // 2 + 1] = 40
        empty = np.full((height, width), 9, np.uint8)
        pictures += [noise, line, 255 - line, empty]
    blob = random.integers(0, 256, (40, 40)).astype(np.uint8)
    blob[:9] = blob[-4:] = blob[:, :2] = blob[:, -13:] = 20
    pictures += [blob, 255 - blob]
    return pictures


def formed(picture: NDArray[np.uint8]) -> list[int] | None:
    try:
        return to_training_form(picture).ravel().tolist()
    except ValueError:
        return None


#: Run by the browser at the page's end; what it finds goes into the document.
SCRIPT = """
const violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.blockedURI));
const given = JSON.parse(document.getElementById("given").textContent);

function stroke(points) {
  const box = pad.getBoundingClientRect();
  const send = (type, [x, y]) => pad.dispatchEvent(new PointerEvent(type, { isPrimary: true,
    clientX: box.left + x * box.width, clientY: box.top + y * box.height }));
  send("pointerdown", points[0]);
  points.forEach((point) => send("pointermove", point));
  send("pointerup", points.at(-1));
  send("pointermove", [0, 0]); // the pen is up: this draws nothing
}

function state() {
  const chart = document.getElementById("latents").data.at(-1);
  return {
    seen: Array.from(greyOf(document.getElementById("seen").getContext("2d"), 28, 28)),
    answer: document.getElementById("answer").textContent,
    bars: [...document.querySelectorAll("#bars li span")].map((bar) => bar.textContent),
    place: [chart.x[0], chart.y[0], chart.z[0]],
  };
}

function enlarge(image) { // dark ink on the paper
  const data = pen.createImageData(280, 280);
  for (let i = 0; i < 280 * 280; i++) {
    const value = 255 - image[Math.floor(i / 2800) * 28 + Math.floor((i % 280) / 10)];
    data.data.set([value, value, value, 255], 4 * i);
  }
  pen.putImageData(data, 0, 0);
}

addEventListener("load", async () => {
  const found = { empty: state() };
  found.forms = given.pictures.map(({ pixels, height, width }) => {
    const form = toTrainingForm(Uint8Array.from(pixels), height, width);
    return form && Array.from(form);
  });
  found.models = given.images.map((image) => classify(Uint8Array.from(image)));
  found.enlarged = given.images.map((image) => { enlarge(image); classifyPad(); return state(); });
  found.drawn = [];
  for (const strokes of given.drawings) {
    clear();
    strokes.forEach(stroke);
    await new Promise(requestAnimationFrame); // the page's own was asked for before
    found.drawn.push({ ...state(), png: pad.toDataURL() });
  }
  document.querySelectorAll(".samples button")[3].click();
  found.sample = state();
  document.getElementById("clear").click();
  found.cleared = state();
  found.violationsBefore = violations.length;
  found.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.body.append(Object.assign(new Image(), { src: "http://127.0.0.1:9/image" }));
  await fetch("http://127.0.0.1:9/data").catch(() => null);
  await new Promise((resolve) => setTimeout(resolve, 200));
  found.violationsAfter = violations;
  const element = document.createElement("pre");
  element.id = "found";
  element.textContent = JSON.stringify(found);
  document.body.append(element);
});
"""

DRAWINGS = [
    [[(0.5, 0.2), (0.5, 0.8)]],
    [[(0.3, 0.2), (0.7, 0.2), (0.45, 0.8)]],
    [[(0.5, 0.2), (0.3, 0.4), (0.35, 0.7), (0.6, 0.75), (0.7, 0.4), (0.5, 0.2)]],
    [[(0.6, 0.15), (0.3, 0.55), (0.75, 0.55)], [(0.6, 0.3), (0.6, 0.9)]],
]


@pytest.fixture(scope="module")
def found(page: str, trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the page did in a browser, and how its files and network were used."""
    if BROWSER is None:
        pytest.skip("no chromium and no google-chrome on this machine")
    folder = tmp_path_factory.mktemp("browser")
    given = {
        "images": trained.images[:60].reshape(60, -1).tolist(),
        "pictures": [
            {"pixels": p.ravel().tolist(), "height": p.shape[0], "width": p.shape[1]}
            for p in strange_pictures()
        ],
        "drawings": DRAWINGS,
    }
    (folder / "page.html").write_text(
        f'{page}<script type="application/json" id="given">{json.dumps(given)}</script>'
        f"<script>{SCRIPT}</script>"
    )
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--use-angle=swiftshader"),
        *("--enable-unsafe-swiftshader", f"--user-data-dir={folder / 'profile'}"),
        *("--virtual-time-budget=60000", "--dump-dom", (folder / "page.html").as_uri()),
    ]
    done = subprocess.run(
        [BROWSER, *options], capture_output=True, text=True, timeout=300, check=False
    )
    result = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result, done.stderr
    return json.loads(html.unescape(result[1]))


@pytest.mark.long
class TestInABrowser:
    def test_pictures_get_the_form_that_python_gives_them(self, found: Any) -> None:
        expected = [formed(picture) for picture in strange_pictures()]
        assert None in expected
        assert found["forms"] == expected

    def test_the_model_is_the_trained_one(self, found: Any, trained: Trained) -> None:
        weights = digit_report.read_weights(trained.classifier)
        z = [model["z"] for model in found["models"]]
        assert np.allclose(z, digit_report.encode(weights, trained.images[:60]), atol=1e-4)
        probabilities = [model["probabilities"] for model in found["models"]]
        assert np.allclose(probabilities, trained.predictions.probabilities[:60], atol=1e-4)

    def test_stored_digits_on_the_paper(self, found: Any, trained: Trained) -> None:
        weights = digit_report.read_weights(trained.classifier)
        enlarged = [255 - image.repeat(10, 0).repeat(10, 1) for image in trained.images[:60]]
        for picture, state in zip(enlarged, found["enlarged"], strict=True):
            assert_shows(state, to_training_form(picture), weights)

    def test_strokes_of_the_pen(self, found: Any, trained: Trained, tmp_path: Path) -> None:
        """What is on the paper, saved as a picture, is classified by `--input` likewise."""
        weights = digit_report.read_weights(trained.classifier)
        inks = set()
        for state in found["drawn"]:
            path = tmp_path / "drawing.png"
            path.write_bytes(base64.b64decode(state["png"].partition(",")[2]))
            (image,) = read_pictures(path).images
            assert_shows(state, image, weights)
            inks.add(image.tobytes())
        assert len(inks) == len(DRAWINGS)

    def test_an_image_of_the_test_set(self, found: Any, trained: Trained) -> None:
        first = trained.images[trained.predictions.label == 3][0]
        assert_shows(found["sample"], first, digit_report.read_weights(trained.classifier))

    def test_empty_paper(self, found: Any) -> None:
        assert found["empty"] == found["cleared"]
        assert found["empty"]["answer"] == "Draw a digit."
        assert set(found["empty"]["bars"]) == {""}
        assert found["empty"]["place"] == [None] * 3

    def test_no_request_leaves(self, found: Any) -> None:
        assert all(name.startswith("data:") for name in found["resources"])
        assert found["violationsBefore"] == 0
        # Whatever tries is stopped:
        stopped = {"http://127.0.0.1:9/image", "http://127.0.0.1:9/data"}
        assert set(found["violationsAfter"]) == stopped


def assert_shows(state: Any, image: NDArray[np.uint8], weights: Any) -> None:
    """The page shows this image, its class, its probabilities and its place."""
    assert state["seen"] == image.ravel().tolist()
    logits = digit_report.classify(weights, image[None])
    assert state["answer"] == f"This is a {logits[0].argmax()}."
    shown = [float(text.rstrip("%")) / 100 for text in state["bars"]]
    made = Predictions.from_logits(np.arange(1), np.zeros(1, np.int64), logits)
    assert np.allclose(shown, made.probabilities[0], atol=6e-4)
    assert np.allclose(state["place"], digit_report.encode(weights, image[None])[0], atol=1e-4)
