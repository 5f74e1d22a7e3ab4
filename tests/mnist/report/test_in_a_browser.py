"""The report's page in Chromium: with a mouse, by keyboard, for screen readers, on a phone."""

import base64
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mnist.own_pictures import read_pictures
from tests.mnist.report.pages import Trained

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long

#: The browser: the environment variable, or a program on the PATH. The tests do not download one.
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MISSING = (
    "no chromium or google-chrome, which opens report.html; CHROMIUM=/path/to/chromium names it"
)
SIZES = {"wide": (1280, 800), "phone": (390, 844)}
LATENTS = "document.getElementById('latents')"
EYE = f"() => Object.values({LATENTS}.layout.scene.camera.eye).map((x) => +x.toFixed(3))"
#: What the page shows of a drawing.
STATE = """() => ({
  seen: Array.from(greyOf(document.getElementById("seen").getContext("2d"), 28)),
  answer: document.getElementById("answer").textContent,
  share: document.getElementById("share").textContent,
  bars: [...document.querySelectorAll("#bars li span")].map((bar) => bar.textContent),
  place: ["x", "y", "z"].map((axis) => document.getElementById("latents").data.at(-1)[axis][0]),
  png: document.getElementById("pad").toDataURL(),
})"""
STROKES = [
    [(0.5, 0.2), (0.5, 0.8)],
    [(0.3, 0.2), (0.7, 0.2), (0.45, 0.8)],
    [(0.5, 0.2), (0.3, 0.4), (0.35, 0.7), (0.6, 0.75), (0.7, 0.4), (0.5, 0.2)],
]


@pytest.fixture(scope="module")
def chromium() -> Iterator["Browser"]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
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


def violations(page: "Page") -> list[str]:
    """What axe-core finds: rule, help and element of each violation, with its best practices."""
    from axe_playwright_python.sync_playwright import Axe

    return [
        f"{rule['id']}: {rule['help']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for rule in Axe().run(page).response["violations"]
        for node in rule["nodes"]
    ]


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
    probabilities, latent = trained.classify(seen)
    assert state["answer"] == f"Answer: {probabilities[0].argmax()}"
    assert state["share"] == f"{state['bars'][probabilities[0].argmax()]} probability"
    shown = [float(text.rstrip("%")) / 100 for text in state["bars"]]
    assert np.allclose(shown, probabilities[0], atol=6e-4)
    assert np.allclose(state["place"], latent[0], atol=1e-4)


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
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert wide.evaluate(outline) == "solid", f"the focus on {names[-1]} is not visible"
    assert names == [
        *("Skip to the results", "Clear"),
        *(f"Test image of the digit {digit}" for digit in range(10)),
        *("Rotate left", "Rotate right", "Rotate up", "Rotate down"),
        *("Zoom in", "Zoom out", "Reset the view"),
    ]
    start = wide.evaluate(EYE)
    for name, key in (("Rotate left", "Enter"), ("Zoom in", "Space"), ("Zoom in", "ArrowUp")):
        wide.get_by_role("button", name=name).press(key)
        wide.wait_for_function(f"(old) => String(({EYE})()) !== String(old)", arg=start)
        wide.get_by_role("button", name="Reset the view").press("Enter")
        wide.wait_for_function(f"(old) => String(({EYE})()) === String(old)", arg=start)


def test_drawings_test_images_and_clear(wide: "Page", trained: Trained, tmp_path: Path) -> None:
    """What is on the paper, saved as a picture, is classified by `--input` likewise."""
    empty = wide.evaluate(STATE)
    assert (empty["answer"], empty["share"]) == ("Draw a digit.", "")
    assert set(empty["bars"]) == {""}
    assert empty["place"] == [None] * 3
    for points in STROKES:
        state = draw(wide, points)
        picture = tmp_path / "drawing.png"
        picture.write_bytes(base64.b64decode(state["png"].partition(",")[2]))
        assert_shows(state, read_pictures(picture).images[0], trained)
        wide.locator("#clear").press("Space")
        assert wide.evaluate(STATE) == empty
    wide.locator(".samples button").nth(3).press("Enter")
    first = trained.images[trained.predictions.label == 3][0]
    assert_shows(wide.evaluate(STATE), first, trained)


def test_no_request_leaves(wide: "Page") -> None:
    used = wide.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(name.startswith("data:") for name in used)
    blocked = wide.evaluate("""async () => {
      const blocked = [];
      document.addEventListener("securitypolicyviolation", (e) => blocked.push(e.blockedURI));
      document.body.append(Object.assign(new Image(), { src: "http://127.0.0.1:9/image" }));
      await fetch("http://127.0.0.1:9/data").catch(() => null);
      await new Promise((resolve) => setTimeout(resolve, 200));
      return blocked;
    }""")
    assert set(blocked) == {"http://127.0.0.1:9/image", "http://127.0.0.1:9/data"}


def test_screen_readers(wide: "Page") -> None:
    tree = wide.locator("body").aria_snapshot()
    regions = re.findall(r"^ *- region \"(.*?)\":", tree, re.MULTILINE)
    assert regions == [
        *("Draw a digit", "Training", "Reconstructions", "Confusion matrix"),
        "Most confident mistakes",
    ]
    assert "- status: Draw a digit." in tree
    assert re.search(r'table "[\d,]+ of 300 are right', tree)
    assert 'columnheader "predicted as 3"' in tree
    names = wide.evaluate("[...document.querySelectorAll('main img')].map((i) => i.alt)")
    assert len(set(names[:30])) == 30
    kinds = (
        r"Test image of the digit \d, predicted as \d",
        r"Digit \d, (original|reconstruction)",
        r"Label \d, predicted as \d with probability [\d.]+%",
    )
    assert [name for name in names if not re.fullmatch("|".join(kinds), name)] == []


@pytest.mark.parametrize(("scheme", "size"), [("light", "phone"), ("dark", "wide")])
def test_no_violations(chromium: "Browser", path: Path, scheme: str, size: str) -> None:
    with opened(chromium, path, scheme, size) as page:
        page.locator(".samples button").nth(3).click()
        assert violations(page) == []
        page.evaluate("document.querySelector('.samples img').alt = ''")
        page.evaluate("document.querySelector('section > p').style.color = '#777'")
        rules = {line.split(":")[0] for line in violations(page)}
        assert rules == {"button-name", "color-contrast"}  # they are found


def test_a_phone_shows_the_answer_while_drawing(chromium: "Browser", path: Path) -> None:
    with opened(chromium, path, "light", "phone") as phone:
        width, height = SIZES["phone"]
        assert phone.evaluate("document.scrollingElement.scrollWidth") == width
        draw(phone, STROKES[0])
        for name in ("#answer", "#pad", "#clear"):
            box = phone.locator(name).bounding_box()
            assert box is not None
            assert box["y"] >= 0
            assert box["y"] + box["height"] <= height, name
        phone.evaluate("scrollTo(0, document.querySelector('.samples').offsetTop - 100)")
        assert phone.evaluate("scrollY") > 100
        box = phone.locator("#answer").bounding_box()
        assert box is not None
        assert box["y"] >= 0
