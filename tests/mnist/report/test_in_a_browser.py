"""The report's page in Chromium: with a mouse, by keyboard, for screen readers, on a phone."""

import base64
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mnist.own_pictures import read_pictures
from tests.mnist.report.pages import Trained, predict

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long

#: The browser: the environment variable, or a program on the PATH. The tests do not download one.
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SIZES = {"wide": (1280, 800), "phone": (390, 844)}
LATENTS = "document.getElementById('latents')"
EYE = f"() => Object.values({LATENTS}.layout.scene.camera.eye).map((x) => +x.toFixed(3))"
#: What the page shows of a drawing.
STATE = """() => ({
  seen: Array.from(greyOf(document.getElementById("seen").getContext("2d"), 28)),
  answer: document.getElementById("answer").textContent,
  bars: [...document.querySelectorAll("#bars li span")].map((bar) => bar.textContent),
  png: document.getElementById("pad").toDataURL(),
})"""
STROKE = [(0.3, 0.2), (0.7, 0.2), (0.45, 0.8)]


@pytest.fixture(scope="module")
def chromium() -> Iterator["Browser"]:
    if CHROMIUM is None:
        pytest.skip("no chromium or google-chrome; CHROMIUM=/path/to/chromium names it")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="no playwright; ./run setup --dev installs it"
    )
    arguments = ["--disable-gpu", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
    with sync_api.sync_playwright() as playwright:
        options = {"executable_path": CHROMIUM, "args": arguments, "chromium_sandbox": False}
        browser = playwright.chromium.launch(**options)
        yield browser
        browser.close()


@contextmanager
def opened(browser: "Browser", path: Path, scheme: Any, size: str) -> Iterator["Page"]:
    """A page whose charts are drawn; an error of the page's scripts fails the test."""
    width, height = SIZES[size]
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})
    errors: list[Any] = []
    page.on("pageerror", lambda error: errors.append(error))
    page.set_default_timeout(120_000)  # without a GPU, two cores draw the chart
    page.goto(path.as_uri())
    page.wait_for_function(f"{LATENTS}?.layout?.scene?.camera && {LATENTS}.querySelector('canvas')")
    yield page
    page.close()
    assert not errors


@pytest.fixture(scope="module")
def path(page: str, trained: Trained) -> Path:
    return trained.runs / "report.html"


@pytest.fixture(scope="module")
def wide(chromium: "Browser", path: Path) -> Iterator["Page"]:
    with opened(chromium, path, "light", "wide") as page:
        yield page


def draw(page: "Page", points: list[tuple[float, float]]) -> Any:
    """Draws a line with the mouse, through points in shares of the canvas; returns the state."""
    page.locator("#pad").scroll_into_view_if_needed()
    box = page.locator("#pad").bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=5)
    page.mouse.up()
    page.mouse.move(box["x"], box["y"])  # the pen is up: this draws nothing
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    return page.evaluate(STATE)


def assert_shows(state: Any, image: Any, trained: Trained) -> None:
    """The page shows nearly this image, and what the model says of the image that it shows."""
    seen = np.array(state["seen"], np.uint8).reshape(1, 28, 28)
    assert np.abs(seen[0].astype(int) - image).mean() < 2
    (probabilities,) = predict(trained.model, seen).probabilities
    assert state["answer"] == f"Answer: {probabilities.argmax()}"
    shown = np.array([float(text.rstrip("%")) / 100 for text in state["bars"]])
    assert np.allclose(shown + 5e-4, probabilities, atol=6e-4)  # rounded down


def test_the_keys(wide: "Page") -> None:
    """Their order from the top of the page, and that buttons and arrows turn the view."""
    name_of = """() => {
      const e = document.activeElement;
      return e.ariaLabel || e.querySelector?.("img")?.alt || e.textContent.trim();
    }"""
    names = []
    for _ in range(19):
        wide.keyboard.press("Tab")
        names.append(wide.evaluate(name_of).split(",")[0])
    assert names == [
        *("Skip to the results", "Clear"),
        *(f"Test image of the digit {digit}" for digit in range(10)),
        *("Rotate left", "Rotate right", "Rotate up", "Rotate down"),
        *("Zoom in", "Zoom out", "Reset the view"),
    ]
    start = wide.evaluate(EYE)
    for name, key in (("Rotate left", "Enter"), ("Zoom in", "ArrowUp")):
        wide.get_by_role("button", name=name).press(key)
        wide.wait_for_function(f"(old) => String(({EYE})()) !== String(old)", arg=start)
        wide.get_by_role("button", name="Reset the view").press("Enter")
        wide.wait_for_function(f"(old) => String(({EYE})()) === String(old)", arg=start)


def test_drawings_test_images_and_clear(wide: "Page", trained: Trained, tmp_path: Path) -> None:
    """What is on the paper, saved as a picture, is classified by `--input` likewise."""
    empty, bars = wide.evaluate(STATE), wide.locator("#bars")
    assert not bars.is_visible()
    state = draw(wide, STROKE)
    assert bars.is_visible()
    picture = tmp_path / "drawing.png"
    picture.write_bytes(base64.b64decode(state["png"].partition(",")[2]))
    assert_shows(state, read_pictures(picture).images[0], trained)
    wide.locator("#clear").press("Space")
    assert wide.evaluate(STATE) == empty
    wide.locator(".samples button").nth(3).press("Enter")
    first = trained.images[trained.predictions.label == 3][0]
    assert_shows(wide.evaluate(STATE), first, trained)


@pytest.mark.parametrize(("scheme", "size"), [("light", "phone"), ("dark", "wide")])
def test_no_violations(chromium: "Browser", path: Path, scheme: str, size: str) -> None:
    """axe-core finds none, and a phone shows the page's whole width."""
    from axe_playwright_python.sync_playwright import Axe

    with opened(chromium, path, scheme, size) as page:
        page.locator(".samples button").nth(3).click()
        found = Axe().run(page).response["violations"]
        assert [(rule["help"], [node["html"] for node in rule["nodes"]]) for rule in found] == []
        assert page.evaluate("document.scrollingElement.scrollWidth") == SIZES[size][0]
