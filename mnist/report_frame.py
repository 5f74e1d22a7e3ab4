"""Writes a report as one HTML file, which needs no network and sends no data.

The page contains its style, pictures and data, and plotly's script, which draws the charts. A
content security policy in the page's head forbids the browser to fetch anything.
"""

import base64
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from numpy.typing import NDArray

from megakit.runtime.atomic_files import write_atomically
from mnist.drawing import to_png
from mnist.figure_style import BAD, GOOD, INK

TEMPLATES = Path(__file__).parent / "templates"
INTERPRETER = TEMPLATES / "graph.js"
#: Inserted values are escaped, unless they are `Markup`.
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
)

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'
AXIS = {"gridcolor": "#d8dee4", "zerolinecolor": "#d8dee4", "automargin": True}
AXIS_3D = {
    "title": {"text": ""},
    "showticklabels": False,
    "showbackground": False,
    "gridcolor": "#d8dee4",
    "zerolinecolor": "#7d8590",
    "showspikes": False,
}
CLEAR = "rgba(0,0,0,0)"
#: What all charts share, as a template of plotly.
CHART_STYLE = {
    "font": {"family": FONT, "size": 13, "color": INK},
    "paper_bgcolor": CLEAR,
    "plot_bgcolor": CLEAR,
    "margin": {"l": 48, "r": 12, "t": 44, "b": 44},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    "xaxis": AXIS,
    "yaxis": AXIS,
    "scene": {"xaxis": AXIS_3D, "yaxis": AXIS_3D, "zaxis": AXIS_3D, "aspectmode": "cube"},
}


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
    page = ENVIRONMENT.get_template("report.html").render(
        title=title,
        facts=facts,
        sections=sections,
        notes=notes,
        font=Markup(FONT),
        colors={"right": GOOD, "wrong": BAD},
        plotly=Markup(importlib.import_module("plotly.offline").get_plotlyjs()),
    )
    write_atomically(path, page)


def chart(
    traces: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    label: str,
    *,
    name: str = "",
    height: int = 360,
) -> Markup:
    """Returns the HTML of a chart, which plotly draws when the page opens.

    Args:
        traces: The traces in plotly's JSON format; sequences of numbers may be arrays.
        layout: The layout in the same format, over the settings that all charts share.
        label: A description of the chart, unique on the page, for users who cannot see the chart.
        name: The id of the element, for a script; by default, it is made from the label.
        height: The height in CSS pixels.
    """
    html = importlib.import_module("plotly.io").to_html(
        {"data": traces, "layout": {"template": {"layout": CHART_STYLE}, **layout}},
        config={"displayModeBar": False},
        include_plotlyjs=False,
        full_html=False,
        default_height=height,
        validate=False,
        div_id=name or "chart-" + re.sub(r"\W+", "-", label),
    )
    whole = Markup('<div class=chart role=img aria-label="{}">{}</div>')
    return whole.format(label, Markup(html))


def picture(image: NDArray[np.uint8], description: str) -> Markup:
    """Returns an image (H, W), 0 black and 255 white, as an HTML element with embedded data."""
    data = base64.b64encode(to_png(image)).decode()
    return Markup('<img src="data:image/png;base64,{}" alt="{}">').format(data, description)


def embed_graph(
    description: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]], name: str
) -> Markup:
    """Returns HTML with a `megakit.models.graph.Graph` and the script that runs the graph.

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
    # NaN and infinity become null, which JSON has.
    encoder = importlib.import_module("plotly.utils").PlotlyJSONEncoder
    model = htmlsafe_json_dumps({"graph": description, "weights": arrays}, cls=encoder)
    script = Markup(INTERPRETER.read_text("utf-8"))
    element = Markup('<script type="application/json" id="{}">{}</script>\n<script>\n{}</script>')
    return element.format(name, model, script)
