"""One look for all figures: readable on a page and on a phone, whoever sees the colours how."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASS_COLORS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
"""Ten that stay apart under colour blindness (Petroff, 'Accessible color sequences', 2021)."""
INK = "#24292f"
GOOD, BAD = "#2f6fb0", "#bd1f01"

STYLE: dict[str, Any] = {
    "figure.facecolor": "white",
    "figure.dpi": 120,
    "savefig.dpi": 120,
    "font.family": "DejaVu Sans",  # the one that comes with matplotlib
    "font.size": 11,
    "text.color": INK,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.labelsize": 12,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#8c959f",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#d8dee4",
    "legend.frameon": False,
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Lets figures that are made and drawn within it look alike."""
    import matplotlib
    from cycler import cycler

    cycle = {"axes.prop_cycle": cycler(color=CLASS_COLORS)}  # for what names no colour of its own
    with matplotlib.rc_context({**STYLE, **cycle}):
        yield


def class_color(number: int) -> str:
    """The colour of a class, the same in all figures; from the eleventh on they repeat."""
    return CLASS_COLORS[number % len(CLASS_COLORS)]


def to_png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file, the same bytes for the same figure."""
    content = io.BytesIO()
    with figure_style():
        figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
