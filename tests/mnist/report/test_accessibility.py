"""The report's page by keyboard, for screen readers, on a phone, and in both colour schemes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.mnist.report import browser as tools
from tests.mnist.report.browser import LATENTS, SCHEMES, SIZES, draw, focused, opened, violations
from tests.mnist.report.pages import Trained

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long

#: Buttons and keys that turn or move the view.
TURNS = [
    *(("Rotate left", "Enter"), ("Rotate up", "Enter"), ("Zoom in", "Space")),
    *(("Zoom in", "ArrowRight"), ("Zoom in", "-")),
]
EYE = f"() => Object.values({LATENTS}.layout.scene.camera.eye).map((x) => +x.toFixed(3))"


@pytest.fixture(scope="module")
def chromium() -> Iterator["Browser"]:
    with tools.started() as browser:
        yield browser


@pytest.fixture
def path(page: str, trained: Trained) -> Path:
    return trained.runs / "report.html"


@pytest.fixture
def wide(chromium: "Browser", path: Path) -> Iterator["Page"]:
    with opened(chromium, path, "light", "wide") as page:
        yield page


@pytest.fixture
def phone(chromium: "Browser", path: Path) -> Iterator["Page"]:
    with opened(chromium, path, "light", "phone") as page:
        yield page


class TestAxe:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_no_violations(self, chromium: "Browser", path: Path, scheme: str, size: str) -> None:
        with opened(chromium, path, scheme, size) as page:
            assert violations(page) == []
            page.locator(".samples button").nth(3).click()
            for summary in page.locator("summary").all():
                summary.click()
            assert violations(page) == []

    def test_violations_are_found(self, wide: "Page") -> None:
        wide.evaluate("document.querySelector('.samples img').alt = ''")
        wide.evaluate("document.querySelector('section > p').style.color = '#ccc'")
        rules = {line.split(":")[0] for line in violations(wide)}
        assert rules == {"button-name", "color-contrast"}


class TestPhone:
    def test_the_answer_is_visible_while_drawing(self, phone: "Page") -> None:
        draw(phone, (0.5, 0.2), (0.5, 0.8))
        phone.wait_for_function("document.getElementById('answer').textContent != 'Draw a digit.'")
        assert re.fullmatch(r"Answer: \d", phone.locator("#answer").inner_text())
        for name in ("#answer", "#pad", "#clear"):
            assert is_within_the_window(phone, name), name
        phone.evaluate("scrollTo(0, document.querySelector('.samples').offsetTop - 100)")
        assert phone.evaluate("scrollY") > 100
        assert is_within_the_window(phone, "#answer")

    def test_nothing_is_wider_than_the_window(self, phone: "Page") -> None:
        assert phone.evaluate("document.scrollingElement.scrollWidth") == SIZES["phone"][0]


def is_within_the_window(page: "Page", name: str) -> bool:
    box, size = page.locator(name).bounding_box(), page.viewport_size
    assert box is not None
    assert size is not None
    return (
        box["x"] >= 0
        and box["y"] >= 0
        and box["x"] + box["width"] <= size["width"]
        and box["y"] + box["height"] <= size["height"]
    )


class TestKeyboard:
    def test_the_order_of_the_keys(self, wide: "Page") -> None:
        names = []
        for _ in range(20):
            wide.keyboard.press("Tab")
            names.append(focused(wide))
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert wide.evaluate(outline) == "solid", f"the focus on {names[-1]} is not visible"
        assert names[:2] == ["Skip to the results", "Clear"]
        assert [name.split(",")[0] for name in names[2:12]] == [
            f"Test image of the digit {digit}" for digit in range(10)
        ]
        assert names[12:] == [
            *("Rotate left", "Rotate right", "Rotate up", "Rotate down"),
            *("Zoom in", "Zoom out", "Reset the view", "The points as a table"),
        ]

    def test_a_test_image_and_clear(self, wide: "Page", trained: Trained) -> None:
        wide.locator(".samples button").nth(3).focus()
        wide.keyboard.press("Enter")
        row = int((trained.predictions.label == 3).argmax())
        answer = wide.locator("#answer")
        assert answer.inner_text() == f"Answer: {trained.predictions.prediction[row]}"
        wide.locator("#clear").focus()
        wide.keyboard.press("Space")
        assert answer.inner_text() == "Draw a digit."

    def test_the_view_turns(self, wide: "Page") -> None:
        start = wide.evaluate(EYE)
        for name, key in TURNS:
            wide.get_by_role("button", name=name).press(key)
            wide.wait_for_function(f"(old) => String(({EYE})()) !== String(old)", arg=start)
            wide.get_by_role("button", name="Reset the view").press("Enter")
            wide.wait_for_function(f"(old) => String(({EYE})()) === String(old)", arg=start)


class TestScreenReaders:
    def test_the_tree(self, wide: "Page") -> None:
        tree = wide.locator("body").aria_snapshot()
        assert len(re.findall(r"heading .* \[level=1\]", tree)) == 1
        regions = re.findall(r"^ *- region \"(.*?)\":", tree, re.MULTILINE)
        assert regions == [
            *("Draw a digit", "Training", "Reconstructions", "Confusion matrix"),
            "Most confident mistakes",
        ]
        assert "- banner:" in tree
        assert "- main:" in tree
        assert "- status: Draw a digit." in tree
        assert re.search(r'table "[\d,]+ of 300 are right', tree)
        assert re.search(r'columnheader "predicted as 3"', tree)
        assert 'rowheader "3"' in tree

    def test_each_picture_says_what_it_shows(self, wide: "Page") -> None:
        names = wide.evaluate("[...document.querySelectorAll('main img')].map((i) => i.alt)")
        assert len(names) > 40
        assert len(set(names[:30])) == 30
        kinds = (
            r"Test image of the digit \d, predicted as \d",
            r"Digit \d, (original|reconstruction)",
            r"Label \d, predicted as \d with probability [\d.]+%",
        )
        assert [name for name in names if not re.fullmatch("|".join(kinds), name)] == []
