"""Writes a report as one HTML file, which needs no network and sends no data.

The page contains its style, pictures and data, and plotly's script, which draws the charts. A
content security policy in the page's head forbids the browser to fetch anything.
"""

import base64
import html
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakit.reporting.drawing import to_png
from megakit.reporting.figure_style import BAD, GOOD
from megakit.reporting.files import write_atomically
from megakit.reporting.page_colors import PAGE_COLORS, style_sheet

TEMPLATE = Path(__file__).parent / "templates" / "report.html"
CHARTS = TEMPLATE.with_name("charts.js")
INTERPRETER = TEMPLATE.with_name("graph.js")


@dataclass(frozen=True)
class Section:
    """Holds a section of the page: a heading, a description as plain text, and HTML.

    A script in the HTML that needs the charts has to wait for the event `DOMContentLoaded`.
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
            f'<section aria-label="{html.escape(section.title)}">\n'
            f"<h2>{html.escape(section.title)}</h2>\n"
            f"<p>{html.escape(section.text)}</p>\n{section.body}\n</section>"
            for section in sections
        ),
        "colors": style_sheet(),
        "right": GOOD,
        "wrong": BAD,
        "pairs": embed_json(list(PAGE_COLORS.values()), "page-colors"),
        "charts": CHARTS.read_text("utf-8"),
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
        traces: The traces in plotly's JSON format; sequences of numbers may be arrays. Colours of
            the light scheme in `page_colors` follow the scheme of the browser.
        layout: The layout in the same format. The template adds the settings of all charts.
        label: A description of the chart, for users who cannot see the chart.
        name: The id of the element, for a script.
        height: The height in CSS pixels.
    """
    figure = embed_json({"data": traces, "layout": layout})
    return (
        f'<div class=chart{_id(name)} role=img aria-label="{html.escape(label)}" '
        f'style="height: {height}px">{figure}</div>'
    )


def picture(image: NDArray[np.uint8], description: str) -> str:
    """Returns an image (H, W), 0 black and 255 white, as an HTML element with embedded data."""
    data = base64.b64encode(to_png(image)).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(description)}">'


def embed_json(value: Any, name: str = "") -> str:
    """Returns an HTML element with JSON data for a script, which parses the element's text.

    Args:
        value: A value of JSON types and arrays of numbers. NaN and infinity become null.
        name: The id of the element.
    """
    encoder = importlib.import_module("plotly.utils").PlotlyJSONEncoder
    text = json.dumps(value, cls=encoder, separators=(",", ":"))
    # "<" could end the element; JSON strings may contain this escape sequence instead.
    text = text.replace("<", "\\u003c")
    return f'<script type="application/json"{_id(name)}>{text}</script>'


def embed_graph(
    description: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]], name: str
) -> str:
    """Returns HTML with a `megakit.models.export.Graph` and the script that runs the graph.

    A later script of the page passes the text of the element `name` to `readGraph`. The weights are
    stored as little-endian float32 in base64.
    """
    arrays = {
        weight: {
            "shape": list(array.shape),
            "float32": base64.b64encode(array.astype("<f4").tobytes()).decode(),
        }
        for weight, array in weights.items()
    }
    model = embed_json({"graph": description, "weights": arrays}, name)
    return f"{model}\n<script>\n{INTERPRETER.read_text('utf-8')}</script>"


def _id(name: str) -> str:
    return f' id="{html.escape(name)}"' if name else ""
