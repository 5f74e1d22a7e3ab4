"""The report's page in Chromium: with a mouse, by keyboard, for screen readers, on a phone."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.mnist.report.pages import Trained, predict

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long

#: The browser: the environment variable, or a program on the PATH. The tests do not download one.
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SIZES = {"wide": (1280, 800), "phone": (360, 800)}
EYE = """() => Object.values(document.getElementById("space").layout.scene.camera.eye)
  .map((x) => +x.toFixed(3))"""
#: What the page shows of a drawing.
STATE = """() => ({
  seen: greyOf(document.getElementById("seen").getContext("2d"), 28).map((grey) => 255 - grey),
  answer: document.getElementById("answer").textContent,
  bars: [...document.querySelectorAll("#bars li span")].map((bar) => bar.textContent),
})"""


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
def opened(browser: "Browser", path: Path, size: str, **options: Any) -> Iterator["Page"]:
    """An open page; an error of its scripts fails the test."""
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    errors: list[Any] = []
    page.on("pageerror", lambda error: errors.append(error))
    page.set_default_timeout(120_000)  # without a GPU, two cores draw the chart
    page.goto(path.as_uri(), timeout=120_000)
    yield page
    page.close()
    assert not errors


def assert_shows(state: Any, trained: Trained) -> None:
    """The page shows what the model says of the image that the page shows."""
    seen = np.array(state["seen"], np.uint8).reshape(1, 28, 28)
    (probabilities,) = predict(trained.model, seen, np.zeros(1, np.int64)).probabilities
    assert state["answer"] == f"Answer: {probabilities.argmax()}"
    shown = np.array([float(text.rstrip("%")) / 100 for text in state["bars"]])
    assert np.allclose(shown + 5e-4, probabilities, atol=6e-4)  # rounded down


def test_the_canvas_the_test_images_and_the_keys(
    chromium: "Browser", page: Path, trained: Trained
) -> None:
    with opened(chromium, page, "wide") as found:
        names = []
        for _ in range(19):
            found.keyboard.press("Tab")
            names.append(
                found.evaluate("""() => {
                  const e = document.activeElement;
                  return e.ariaLabel || e.querySelector?.("img")?.alt || e.textContent.trim();
                }""")
            )
        assert names == [
            *("Skip to the results", "Clear"),
            *(f"Test image of the digit {digit}" for digit in range(10)),
            *("Rotate left", "Rotate right", "Rotate up", "Rotate down"),
            *("Zoom in", "Zoom out", "Reset the view"),
        ]

        empty, bars = found.evaluate(STATE), found.locator("#bars")
        assert not bars.is_visible()
        pad = found.locator("#pad")
        pad.scroll_into_view_if_needed()
        box = pad.bounding_box()
        assert box is not None
        for number, (x, y) in enumerate([(0.3, 0.2), (0.7, 0.2), (0.45, 0.8)]):
            place = box["x"] + x * box["width"], box["y"] + y * box["height"]
            found.mouse.move(*place, steps=5)
            if number == 0:
                found.mouse.down()
        found.mouse.up()
        found.wait_for_function("document.getElementById('answer').textContent.length < 10")
        found.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        drawn = found.evaluate(STATE)
        assert bars.is_visible()
        assert_shows(drawn, trained)
        ink = np.array(drawn["seen"]).reshape(28, 28)
        rows, columns = np.nonzero(ink)
        assert (
            max(np.ptp(rows), np.ptp(columns)) == 19
        )  # 20 pixels, the centre of mass in the middle
        center = (np.indices((28, 28)) * ink).sum(axis=(1, 2)) / ink.sum()
        assert np.abs(center - 14).max() <= 0.6
        found.locator("#clear").press("Space")
        assert found.evaluate(STATE) == empty
        found.locator(".samples button").nth(3).press("Enter")
        state = found.evaluate(STATE)
        first = trained.images[trained.predictions.label == 3][0]
        assert state["seen"] == first.ravel().tolist()
        assert_shows(state, trained)

        start = found.evaluate(EYE)
        for button in ("Rotate left", "Zoom in"):
            found.get_by_role("button", name=button).press("Enter")
            found.wait_for_function(f"(old) => String(({EYE})()) !== String(old)", arg=start)
            found.get_by_role("button", name="Reset the view").press("Enter")
            found.wait_for_function(f"(old) => String(({EYE})()) === String(old)", arg=start)


def test_the_label_of_a_drawing_covers_no_legend(chromium: "Browser", page: Path) -> None:
    """At the lowest and at the highest point of each class, on a phone."""
    with opened(chromium, page, "phone") as found:
        points: list[list[float]] = (
            found.evaluate("""() => Object.values(data.space.points).flatMap(
            (points) => [-1, 1].map((up) => [...points].sort((a, b) => up * (b[2] - a[2]))[0]))""")
        )
        assert len(points) == 20
        for point in points:
            found.evaluate("(point) => pointAt(point)", point)
            found.evaluate("() => new Promise((done) => requestAnimationFrame(() => done()))")
            label, legend = found.locator("#space text", has_text="your digit"), ".legend"
            top = label.evaluate("(text) => text.getBoundingClientRect().top")
            assert top > found.locator(legend).evaluate("(it) => it.getBoundingClientRect().bottom")


@pytest.mark.parametrize(("scheme", "size"), [("light", "phone"), ("dark", "wide")])
def test_no_violations(chromium: "Browser", page: Path, scheme: str, size: str) -> None:
    """axe-core finds none, and a phone shows the page's whole width."""
    from axe_playwright_python.sync_playwright import Axe

    with opened(chromium, page, size, color_scheme=scheme) as found:
        found.locator(".samples button").nth(3).click()
        violations = Axe().run(found).response["violations"]
        assert [
            (rule["help"], [each["html"] for each in rule["nodes"]]) for rule in violations
        ] == []
        assert found.evaluate("document.scrollingElement.scrollWidth") == SIZES[size][0]


def test_without_javascript(chromium: "Browser", page: Path) -> None:
    """All pictures are shown, and no canvas that does nothing."""
    with opened(chromium, page, "phone", java_script_enabled=False) as found:
        pictures = found.locator("main img:visible")
        assert pictures.count() == 3 + 2 + 2  # predictions, curves, reconstructions
        assert found.locator("#pad:visible, #space:visible, button:visible").count() == 0
        assert "turn on JavaScript" in found.locator("header").inner_text()
