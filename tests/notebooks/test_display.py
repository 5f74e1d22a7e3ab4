"""What the notebook shows: sources as they are today, and figures with a text."""

import base64
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import matplotlib.pyplot as plt
import pytest
from PIL import Image

from megakit.errors import UserError
from mnist import sizes
from mnist.files import DataOptions
from notebooks import display


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What the functions display, in order."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(display, "display", lambda item, **options: seen.append((item, options)))
    return seen


def test_the_source_of_a_class_with_file_and_line() -> None:
    head, _, code = display.source_of(sizes.SizeOptions).partition("\n\n")
    lines = inspect.getsource(sizes).splitlines()
    decorator = lines.index("class SizeOptions:")  # the line before it, counted from 1
    assert head == f"`SizeOptions`: mnist/sizes.py, line {decorator}"
    assert code.startswith("```python\n@dataclass(kw_only=True)\nclass SizeOptions:\n")
    assert code.endswith("\n```")


def test_the_source_of_a_method_is_not_indented() -> None:
    text = display.source_of(DataOptions.resolve_dataset)
    assert text.startswith("`DataOptions.resolve_dataset`: mnist/files.py, line ")
    assert "```python\ndef resolve_dataset(\n    self,\n" in text


def test_a_file_outside_the_project_is_named_without_its_folder() -> None:
    assert display.source_of(textwrap.fill).startswith("`fill`: textwrap.py, line ")


@contextmanager
def wrapped() -> Iterator[None]:
    yield


def test_the_source_of_a_wrapped_function() -> None:
    text = display.source_of(wrapped)
    assert text.startswith("`wrapped`: tests/notebooks/test_display.py, line ")
    assert "def wrapped() -> Iterator[None]:\n    yield" in text


@pytest.mark.parametrize("item", [len, int, 3])
def test_what_has_no_source_is_an_error(item: Any) -> None:
    with pytest.raises(TypeError, match=r"has no source file\. Pass a class"):
        display.source_of(item)


def test_sources_are_shown_one_by_one(shown: list[Any]) -> None:
    display.show_source(UserError, DataOptions)
    assert [item.data for item, _ in shown] == [
        display.source_of(UserError),
        display.source_of(DataOptions),
    ]


def test_a_figure_has_its_text_twice(shown: list[Any]) -> None:
    """As alternative text, and below the picture."""
    plt.plot([0, 1])
    display.show_figure("The line rises.")
    (picture, options), (below, _) = shown
    assert options == {"raw": True, "metadata": {"image/png": {"alt": "The line rises."}}}
    assert picture["text/plain"] == "The line rises."
    size = Image.open(BytesIO(base64.b64decode(picture["image/png"]))).size
    assert min(size) > 100
    assert below.data == "*The line rises.*"
    assert plt.get_fignums() == []
