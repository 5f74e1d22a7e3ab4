"""Shows source code and figures in the notebook."""

import base64
import inspect
import textwrap
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from IPython.display import Markdown, display

ROOT = Path(__file__).resolve().parents[1]


def source_of(item: Any) -> str:
    """Returns the source of a class or function as Markdown, below a line with file and place.

    Markdown is highlighted by Jupyter, VS Code and code hosts, in light and in dark mode. The HTML
    of `IPython.display.Code` has light colors only, and code hosts show it without colors.

    Args:
        item: A class, function or method that is defined in a file.

    Raises:
        TypeError: The item is defined in no file, for example in a cell of a notebook.
    """
    try:
        path = Path(inspect.getfile(inspect.unwrap(item))).resolve()
        lines, first = inspect.getsourcelines(item)
    except (OSError, TypeError):
        raise TypeError(
            f"{item!r} has no source file. Pass a class or a function of a module."
        ) from None
    place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    code = textwrap.dedent("".join(lines)).rstrip()
    return f"`{item.__qualname__}`: {place}, line {first}\n\n```python\n{code}\n```"


def show_source(*items: Any) -> None:
    """Shows the source of classes and functions, with their files and lines; see `source_of`."""
    for item in items:
        display(Markdown(source_of(item)))  # type: ignore[no-untyped-call]


def show_figure(result: str) -> None:
    """Shows matplotlib's current figure, with a text that states its result.

    The text is the picture's alternative text, and stands below the picture, because Jupyter does
    not pass alternative texts to the browser.

    Args:
        result: What the picture shows, in a sentence, for readers who do not see the picture.
    """
    figure, png = plt.gcf(), BytesIO()
    figure.savefig(png, bbox_inches="tight")
    plt.close(figure)
    data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": result}
    display(data, raw=True, metadata={"image/png": {"alt": result}})  # type: ignore[no-untyped-call]
    display(Markdown(f"*{result}*"))  # type: ignore[no-untyped-call]
