"""Sets one style for all figures: readable on a page, on a phone and with colour blindness."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASS_COLORS = (
    *("#2796fd", "#7ca000", "#ae0b05", "#307050", "#4c3eff"),
    *("#8b5780", "#d97488", "#391a44", "#1600b1", "#560013"),
)
"""Ten colours on white: contrast at least 3, and different to colour-blind readers.

The smallest CIEDE2000 difference of two colours is 16, also for readers without one kind of cone
(simulated as in Machado et al., 2009). A search maximised the smallest difference.
"""
INK = "#24292f"
GOOD, BAD = "#2f6fb0", "#bd1f01"
#: The share of `GOOD` over white from which white text has more contrast than black text.
DEEP = 0.9334

STYLE: dict[str, Any] = {
    "figure.dpi": 120,
    "font.family": "DejaVu Sans",  # included in matplotlib
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
    """Applies the style to figures that are created and drawn inside the `with` block."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def class_color(number: int) -> str:
    """Returns the colour of a class, the same in all figures; colours repeat after ten classes."""
    return CLASS_COLORS[number % len(CLASS_COLORS)]


def to_png(figure: Figure) -> bytes:
    """Returns a figure as PNG data; equal figures give equal bytes."""
    content = io.BytesIO()
    with figure_style():
        figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
