"""A report as one HTML file: it opens without a network, and sends nothing anywhere.

The page holds all it needs: its style, its pictures, its data, and the script that draws its
charts (plotly's). A policy in its head forbids the browser to fetch anything.
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
    """A part of the page under a heading of its own.

    Attributes:
        title: The heading.
        text: What there is to see, as plain text.
        body: HTML. A script in it that needs the charts waits for the event `DOMContentLoaded`.
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
    """Writes the page, in one step.

    Args:
        path: The file, `.html`.
        title: Heading of the page, and what the browser calls it.
        facts: The few numbers that count, by name; they stand below the heading.
        sections: The parts, in order.
        notes: Lines for the reader, such as what is left out and why.
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
    # In one pass: what is put in is not searched for further places.
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
    """A chart, drawn by plotly when the page opens.

    Args:
        traces: As plotly's JSON has them; sequences of numbers may be arrays.
        layout: Likewise; the template holds what all charts share.
        label: What the chart shows, for those who cannot see it.
        name: Identifies the element, for a script.
        height: In CSS pixels.
    """
    identity = f' id="{html.escape(name)}"' if name else ""
    figure = embed_json({"data": list(traces), "layout": dict(layout)})
    return (
        f'<div class=chart{identity} role=img aria-label="{html.escape(label)}" '
        f'style="height: {height}px">{figure}</div>'
    )


def picture(image: NDArray[np.uint8], description: str) -> str:
    """An image (H, W), 0 black and 255 white, as an element that carries its own data."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(description)}">'


def embed_json(value: Any, name: str = "") -> str:
    """Data for a script of the page, as an element of its own; not-a-number becomes null.

    Args:
        value: Of what JSON knows, and arrays of numbers.
        name: Identifies the element; the script parses its text.
    """
    text = json.dumps(_as_json(value), separators=(",", ":"), allow_nan=False)
    identity = f' id="{html.escape(name)}"' if name else ""
    # "<" could end the element; inside of JSON's strings it may be written like this.
    return (
        f'<script type="application/json"{identity}>{text.replace("<", chr(92) + "u003c")}</script>'
    )


def embed_graph(
    description: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]], name: str
) -> str:
    """Embeds a traced model and the script that runs it.

    A script further down the page passes the element's text to `readGraph`.

    Args:
        description: `description()` of a `megakit.models.graph.Graph`.
        weights: The graph's weights.
        name: Identifies the element.
    """
    model = embed_json({"graph": description, "weights": embed_arrays(weights)}, name)
    return f"{model}\n<script>\n{INTERPRETER.read_text('utf-8')}</script>"


def embed_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, Any]]:
    """Arrays as JSON: the shape, and the float32 values in base64, lowest byte first."""
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
