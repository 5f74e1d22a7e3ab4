"""Writes a report as one HTML file, which needs no network and sends no data.

The page contains its style, pictures and data, and plotly's script, which draws the charts. A
content security policy in the page's head forbids the browser to fetch anything.
"""

import base64
import html
import importlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.reporting.figure_style import BAD, GOOD
from megakit.reporting.files import write_atomically

TEMPLATE = Path(__file__).parent / "templates" / "report.html"
INTERPRETER = TEMPLATE.with_name("graph.js")


@dataclass(frozen=True)
class Section:
    """Holds a section of the page.

    Attributes:
        title: The heading.
        text: A description of the content, as plain text.
        body: HTML. A script that needs the charts has to wait for the event `DOMContentLoaded`.
    """

    title: str
    text: str
    body: str


def write_report(
    path: Path,
    title: str,
    facts: Mapping[str, str],
    sections: Sequence[Section],
    notes: Sequence[str] = (),
) -> None:
    """Writes the page in one step.

    Args:
        path: The file, `.html`.
        title: The heading of the page, and the title in the browser.
        facts: The most important numbers by name, shown below the heading.
        sections: The sections of the page, in order.
        notes: Notes for the reader, such as what is left out and why.
    """
    parts = {
        "title": html.escape(title),
        "facts": "".join(
            f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
            for name, value in facts.items()
        ),
        "notes": "".join(f"<p class=note>{html.escape(note)}</p>" for note in notes),
        "sections": "\n".join(
            f"<section>\n<h2>{html.escape(section.title)}</h2>\n"
            f"<p>{html.escape(section.text)}</p>\n{section.body}\n</section>"
            for section in sections
        ),
        "right": GOOD,
        "wrong": BAD,
        "plotly": importlib.import_module("plotly.offline").get_plotlyjs(),
    }
    # Replaces in one pass, so that inserted text is not searched for placeholders.
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], TEMPLATE.read_text("utf-8"))
    write_atomically(path, page)


def chart(
    traces: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    label: str,
    *,
    name: str = "",
    height: int = 360,
) -> str:
    """Returns the HTML of a chart, which plotly draws when the page opens.

    Args:
        traces: The traces in plotly's JSON format; sequences of numbers may be arrays.
        layout: The layout in the same format. The template adds the settings of all charts.
        label: A description of the chart, for users who cannot see the chart.
        name: The id of the element, for a script.
        height: The height in CSS pixels.
    """
    identity = f' id="{html.escape(name)}"' if name else ""
    figure = embed_json({"data": list(traces), "layout": dict(layout)})
    return (
        f'<div class=chart{identity} role=img aria-label="{html.escape(label)}" '
        f'style="height: {height}px">{figure}</div>'
    )


def picture(image: NDArray[np.uint8], description: str) -> str:
    """Returns an image (H, W), 0 black and 255 white, as an HTML element with embedded data."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(description)}">'


def embed_json(value: Any, name: str = "") -> str:
    """Returns an HTML element with JSON data for a script; NaN and infinity become null.

    Args:
        value: A value of JSON types and arrays of numbers.
        name: The id of the element; the script parses the element's text.
    """
    text = json.dumps(_as_json(value), separators=(",", ":"), allow_nan=False)
    identity = f' id="{html.escape(name)}"' if name else ""
    # "<" could end the element; JSON strings may contain this escape sequence instead.
    return (
        f'<script type="application/json"{identity}>{text.replace("<", chr(92) + "u003c")}</script>'
    )


def embed_graph(
    description: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]], name: str
) -> str:
    """Returns HTML with a traced model and the script that runs the model.

    A later script of the page passes the element's text to `readGraph`.

    Args:
        description: `description()` of a `megakit.models.graph.Graph`.
        weights: The graph's weights.
        name: The id of the element with the model.
    """
    model = embed_json({"graph": description, "weights": embed_arrays(weights)}, name)
    return f"{model}\n<script>\n{INTERPRETER.read_text('utf-8')}</script>"


def embed_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, Any]]:
    """Returns arrays as JSON: the shape, and the little-endian float32 values in base64."""
    return {
        name: {
            "shape": list(array.shape),
            "float32": base64.b64encode(array.astype("<f4").tobytes()).decode(),
        }
        for name, array in arrays.items()
    }


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _as_json(value.tolist())
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
