"""Chromium for the tests of report.html, driven by playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: The browser: the environment variable, or a program on the PATH. The tests do not download one.
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MISSING = (
    "no chromium or google-chrome, which opens report.html; CHROMIUM=/path/to/chromium names it"
)
OPTIONS = ["--disable-gpu", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
SIZES = {"wide": (1280, 800), "phone": (390, 844)}
SCHEMES = ("light", "dark")
LATENTS = "document.getElementById('latents')"


def needed_browser() -> str:
    """The path of the browser; skips the test if there is none."""
    if CHROMIUM is None:
        pytest.skip(MISSING)
    return CHROMIUM


@contextmanager
def started() -> Iterator["Browser"]:
    """A browser without a window, which ends with the block."""
    path = needed_browser()
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="no playwright; ./run setup --dev installs it"
    )
    with sync_api.sync_playwright() as playwright:
        options = {"executable_path": path, "args": OPTIONS, "chromium_sandbox": False}
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
    page.goto(path.as_uri())
    page.wait_for_function(f"{LATENTS}?.layout?.scene?.camera && {LATENTS}.querySelector('canvas')")
    yield page
    page.close()
    assert not errors


def violations(page: "Page") -> list[str]:
    """What axe-core finds: rule, help and element of each violation, with its best practices."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {rule['help']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for rule in found
        for node in rule["nodes"]
    ]


def draw(page: "Page", *points: tuple[float, float]) -> None:
    """Draws a line on the canvas with the mouse, through points in shares of the canvas."""
    box = page.locator("#pad").bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=5)
    page.mouse.up()


def focused(page: "Page") -> str:
    """The name of the focused element, as a screen reader would say it."""
    name = """() => {
      const e = document.activeElement;
      return e.ariaLabel || e.querySelector?.("img")?.alt || e.textContent.trim();
    }"""
    found: str = page.evaluate(name)
    return found
