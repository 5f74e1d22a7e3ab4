"""The tutorial's report: found among runs, written, run by node, and used in a real browser.

The classifier is trained for a moment in plain PyTorch, and saved as a run would save it.
"""

import base64
import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megakit.checkpoints.manifest import Manifest, list_files, read_manifest, write_manifest
from megakit.errors import UserError
from megakit.reporting.figure_style import CLASS_COLORS
from megakit.reporting.metrics import Metrics, MetricsFile
from megakit.reporting.predictions import Predictions
from megakit.reporting.report import picture
from mnist import files as mnist_files
from mnist import report as digit_report
from mnist.own_pictures import read_pictures, to_training_form
from tests.javascript import run_javascript
from tests.megakit.models.interpreter import interpret_in_numpy, softmax
from tests.single_process import single_process

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def save(folder: Path, model: Any, stage: str, start: str | None) -> Path:
    """A checkpoint of a model in a run's folder, with a metrics.csv beside."""
    from tests.megakit.models.networks import save_checkpoint

    checkpoint = save_checkpoint(folder / "checkpoints" / "step=000010", model)
    name = type(model).__name__
    files = list_files(checkpoint)
    write_manifest(
        checkpoint, Manifest(stage, name, "digits", 10, run={"start": start}, files=files)
    )
    MetricsFile(folder / "metrics.csv").append(
        Metrics(10, 80, {"pretrain": 0.25, "finetune": 0.5}[stage], 0.6, 1e-3)
    )
    return checkpoint


@dataclass(frozen=True)
class Trained:
    runs: Path
    pretrained: Path
    classifier: Path
    images: NDArray[np.uint8]
    predictions: Predictions
    restored: NDArray[np.float32]
    model: Any

    def classify(self, images: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Probabilities (N, 10) and latents (N, 3), computed by the trained model in torch."""
        predictions = predict(self.model, images)
        assert predictions.latent is not None
        return predictions.probabilities, predictions.latent


def predict(model: Any, images: NDArray[np.uint8], labels: Any = None) -> Predictions:
    """What a model of this module predicts."""
    import torch

    from megakit.models import returns_latent

    with torch.no_grad():
        x = torch.from_numpy(images).unsqueeze(1).float() / 255
        found = model(x, return_latent=True) if returns_latent(model) else (model(x),)
    labels = np.zeros(len(images), np.int64) if labels is None else labels.astype(np.int64)
    return Predictions.from_logits(np.arange(len(images)), labels, *map(np.array, found))


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process():
        yield


@pytest.fixture(scope="module")
def trained(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An autoencoder, and a classifier of digits that was fitted for a second."""
    import torch

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
        restored = autoencoder(x)["x_hat"].reshape(-1, 28, 28).numpy()
    predictions = predict(model, test_images, test_labels)
    return Trained(runs, pretrained, classifier, test_images, predictions, restored, model)


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
    def test_reconstructions_are_those_of_the_model(self, trained: Trained) -> None:
        restored = digit_report.reconstruct(trained.pretrained, trained.images)
        assert restored.shape == (300, 28, 28)
        assert restored.dtype == np.uint8
        expected = (trained.restored.clip(0, 1) * 255).round()
        assert np.abs(restored - expected).max() <= 1
        assert (restored == expected).mean() > 0.99  # the others were halves, but for rounding

    def test_everything_is_there(self, page: str) -> None:
        assert headings(page) == [
            *("Draw a digit", "Training", "Reconstructions", "Confusion matrix"),
            "Most confident mistakes",
        ]
        assert re.findall(r"<h3>(.*?)</h3>", page) == ["Pretraining", "Fine-tuning"]
        assert "Left out" not in page

    def test_each_part_shows_what_its_title_says(self, page: str, trained: Trained) -> None:
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
            image = trained.images[predictions.label == digit][0]
            assert picture(image, f"Test image of a {digit}") in page
            assert picture(image, "original") in page
        colors = page.partition('id="colors">')[2].partition("</script>")[0]
        assert json.loads(colors) == list(CLASS_COLORS)
        wrong = np.flatnonzero(predictions.prediction != predictions.label)
        worst = wrong[np.argsort(-predictions.probabilities.max(axis=1)[wrong], kind="stable")][:25]
        shown = re.findall(r"<b>(\d)</b> as <b class=wrong>(\d)</b>", page)
        expected = zip(predictions.label[worst], predictions.prediction[worst], strict=True)
        assert shown == [(str(label), str(prediction)) for label, prediction in expected]
        assert len(set(shown)) > 3  # else little is compared

    def test_predictions_of_some_images(self, trained: Trained, tmp_path: Path) -> None:
        """The images belong to the predictions by their index."""
        whole, rows = trained.predictions, np.arange(100, 300)
        some = Predictions(rows, whole.label[rows], whole.probabilities[rows])
        path = tmp_path / "report.html"
        digit_report.write_digit_report(path, some, trained.images, trained.classifier, "digits")
        assert "Left out" not in path.read_text("utf-8")

    def test_the_page_says_what_is_gone(self, trained: Trained, tmp_path: Path) -> None:
        shutil.copytree(trained.runs / "finetune", tmp_path / "runs" / "finetune")
        checkpoint = tmp_path / "runs" / "finetune" / "checkpoints" / "step=000010"
        (tmp_path / "runs" / "finetune" / "metrics.csv").unlink()
        path = tmp_path / "report.html"
        digit_report.write_digit_report(
            path, trained.predictions, trained.images, checkpoint, "digits"
        )
        text = path.read_text("utf-8")
        assert headings(text) == ["Draw a digit", "Confusion matrix", "Most confident mistakes"]
        assert re.findall(r"<p class=note>Left out: (.*?) because", text) == [
            "pretraining&#x27;s curves and reconstructions,",
            "the curves of fine-tuning,",
        ]

    def test_a_fresh_start_and_a_damaged_one(self, trained: Trained, tmp_path: Path) -> None:
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
        elsewhere = shutil.copytree(classifier, runs / "some" / "where" / "step=000010")
        assert digit_report.find_pretraining(elsewhere, notes) is None
        file = next((runs / "pretrain.1").rglob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1])
        assert digit_report.find_pretraining(classifier, notes) is None
        assert "no longer contains" in notes[-1]


def assert_same(models: Any, predictions: Predictions, count: int) -> None:
    """What the page's `classify` returned is what the model computes in torch."""
    assert len(models) == count
    probabilities = [model["probabilities"] for model in models]
    assert np.allclose(probabilities, predictions.probabilities[:count], atol=1e-4)
    if predictions.latent is None:
        assert not any("latent" in model for model in models)
    else:
        latents = [model["latent"] for model in models]
        assert np.allclose(latents, predictions.latent[:count], atol=1e-4)


#: Enough of a browser for the page's scripts to load: every element can do anything, to no effect.
SHIM = """
const anything = new Proxy(function () {}, { get: () => anything, apply: () => anything });
const document = {
  getElementById: (name) => (name === "model" ? { textContent: given.model } : anything),
  addEventListener() {},
};
"""


def scripts_of(page: str) -> tuple[str, str]:
    """The text of a page's model, and the scripts that run it and that convert drawings."""
    _, _, rest = page.partition('<script type="application/json" id="model">')
    model, _, rest = rest.partition("</script>")
    scripts = re.findall(r"<script>\n(.*?)</script>", rest, re.DOTALL)[:2]
    assert "function readGraph" in scripts[0]
    assert "function classify" in scripts[1]
    return model, "".join(scripts)


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


def page_of(model: Any, folder: Path, **changes: Any) -> tuple[str, Predictions]:
    """The page of a classifier that is saved in a folder, and what the classifier predicts."""
    images, labels = mnist_files.read_digits("test")
    predictions = replace(predict(model, images, labels), **changes)
    checkpoint = save(folder / "finetune", model, "finetune", None)
    path = folder / "report.html"
    digit_report.write_digit_report(path, predictions, images, checkpoint, "digits")
    return path.read_text("utf-8"), predictions


def notes(page: str) -> list[str]:
    return [html.unescape(note) for note in re.findall(r"<p class=note>(.*?)</p>", page)]


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
        probabilities = trained.predictions.probabilities[:, ::-1]
        page, _ = page_of(trained.model, tmp_path, probabilities=probabilities)
        assert "Draw a digit" not in page
        found = re.match(
            r"Left out: the canvas, because the traced model and predictions.csv disagree on "
            r"(\d+) of 300 images. "
            r"The first is idx (\d+): (\d), not (\d)\.",
            notes(page)[0],
        )
        assert found, notes(page)
        count, row, traced, predicted = map(int, found.groups())
        assert count > 250
        assert (traced, predicted) == (trained.predictions.prediction[row], 9 - traced)

    def test_one_image_that_differs_is_named(self, trained: Trained) -> None:
        probabilities = trained.predictions.probabilities.copy()
        row = int(probabilities.max(axis=1).argmax())
        probabilities[row] = np.roll(probabilities[row], 1)
        others = replace(trained.predictions, probabilities=probabilities)
        with pytest.raises(UserError, match=rf"disagree on 1 of 300 images.* idx {row}:"):
            digit_report.trace_classifier(trained.classifier, trained.images, others)

    def test_one_image_that_differs_is_enough_and_a_tie_is_not(self) -> None:
        probabilities = np.array([[0.9, 0.1], [0.55, 0.45], [0.45, 0.55], [0.7, 0.3]])
        predictions = Predictions(np.arange(4), np.zeros(4, np.int64), probabilities)

        def differences(*classes: int) -> list[int]:
            return digit_report.find_differences(np.array(classes), predictions).tolist()

        assert differences(0, 0, 1, 0) == differences(0, 1, 0, 0) == []
        assert differences(0, 1, 0, 1) == [3]
        assert differences(1, 1, 0, 1) == [0, 3]


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
    halves = np.full((20, 20), 10, np.uint8)  # whose border has as many bright pixels as dark
    halves[:, 10:] = 240
    halves[4:8, 13:15] = 10
    greys = [np.full((30, 30), paper, np.uint8) for paper in (127, 128, 100, 100)]
    for grey, ink in zip(greys, (240, 20, 131, 132), strict=True):
        grey[8:20, 10:14] = ink
    faint = np.pad(halves[:, :10], 3)
    faint[0, 0], faint[-1, -1] = 255, 31  # an eighth of the brightest is 31.875
    pictures += [blob, 255 - blob, halves, *greys, faint]
    return pictures


def formed(picture: NDArray[np.uint8]) -> list[int] | None:
    try:
        return to_training_form(picture).ravel().tolist()
    except ValueError:
        return None


def given_pictures() -> list[dict[str, Any]]:
    return [
        {"pixels": p.ravel().tolist(), "height": p.shape[0], "width": p.shape[1]}
        for p in strange_pictures()
    ]


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
        pytest.skip("no chromium or google-chrome, which opens report.html")
    folder = tmp_path_factory.mktemp("browser")
    given = {
        "images": trained.images[:60].reshape(60, -1).tolist(),
        "pictures": given_pictures(),
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
        assert_same(found["models"], trained.predictions, 60)

    def test_stored_digits_on_the_paper(self, found: Any, trained: Trained) -> None:
        enlarged = [255 - image.repeat(10, 0).repeat(10, 1) for image in trained.images[:60]]
        for drawing, state in zip(enlarged, found["enlarged"], strict=True):
            assert_shows(state, to_training_form(drawing), trained)

    def test_strokes_of_the_pen(self, found: Any, trained: Trained, tmp_path: Path) -> None:
        """What is on the paper, saved as a picture, is classified by `--input` likewise."""
        inks = set()
        for state in found["drawn"]:
            path = tmp_path / "drawing.png"
            path.write_bytes(base64.b64decode(state["png"].partition(",")[2]))
            (image,) = read_pictures(path).images
            assert_shows(state, image, trained)
            inks.add(image.tobytes())
        assert len(inks) == len(DRAWINGS)

    def test_an_image_of_the_test_set(self, found: Any, trained: Trained) -> None:
        first = trained.images[trained.predictions.label == 3][0]
        assert_shows(found["sample"], first, trained)

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


def assert_shows(state: Any, image: NDArray[np.uint8], trained: Trained) -> None:
    """The page shows this image, its class, its probabilities and its place."""
    assert state["seen"] == image.ravel().tolist()
    probabilities, latent = trained.classify(image[None])
    assert state["answer"] == f"This is a {probabilities[0].argmax()}."
    shown = [float(text.rstrip("%")) / 100 for text in state["bars"]]
    assert np.allclose(shown, probabilities[0], atol=6e-4)
    assert np.allclose(state["place"], latent[0], atol=1e-4)
