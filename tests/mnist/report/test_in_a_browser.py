"""The report's page in a real browser."""

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mnist.own_pictures import read_pictures
from tests.mnist.report.browser import OPTIONS, needed_browser
from tests.mnist.report.pages import Trained
from tests.scripts import run

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
    share: document.getElementById("share").textContent,
    bars: [...document.querySelectorAll("#bars li span")].map((bar) => bar.textContent),
    place: [chart.x[0], chart.y[0], chart.z[0]],
  };
}

addEventListener("load", async () => {
  const found = { empty: state() };
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
def found(page: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the page did in a browser, and how its files and network were used."""
    browser = needed_browser()
    folder = tmp_path_factory.mktemp("browser")
    given = {"drawings": DRAWINGS}
    (folder / "page.html").write_text(
        f'{page}<script type="application/json" id="given">{json.dumps(given)}</script>'
        f"<script>{SCRIPT}</script>"
    )
    options = [
        *("--headless", "--no-sandbox", *OPTIONS, f"--user-data-dir={folder / 'profile'}"),
        *("--virtual-time-budget=60000", "--dump-dom", (folder / "page.html").as_uri()),
    ]
    done = run(browser, *options, timeout=300)
    result = re.search(r'<pre id="found">(.*?)</pre>', done.out, re.DOTALL)
    assert result, done.err
    return json.loads(html.unescape(result[1]))


@pytest.mark.long
class TestInABrowser:
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
        assert found["empty"]["share"] == ""
        assert set(found["empty"]["bars"]) == {""}
        assert found["empty"]["place"] == [None] * 3

    def test_no_request_leaves(self, found: Any) -> None:
        assert all(name.startswith("data:") for name in found["resources"])
        assert found["violationsBefore"] == 0
        # Whatever tries is stopped:
        stopped = {"http://127.0.0.1:9/image", "http://127.0.0.1:9/data"}
        assert set(found["violationsAfter"]) == stopped


def assert_shows(state: Any, image: NDArray[np.uint8], trained: Trained) -> None:
    """The page shows nearly this image, and what the model says of the image that it shows."""
    seen = np.array(state["seen"], np.uint8).reshape(1, 28, 28)
    assert np.abs(seen[0].astype(int) - image).mean() < 2
    probabilities, latent = trained.classify(seen)
    assert state["answer"] == f"Answer: {probabilities[0].argmax()}"
    assert state["share"] == f"{state['bars'][probabilities[0].argmax()]} probability"
    shown = [float(text.rstrip("%")) / 100 for text in state["bars"]]
    assert np.allclose(shown, probabilities[0], atol=6e-4)
    assert np.allclose(state["place"], latent[0], atol=1e-4)
