"""Sets one style for all figures: readable on a page, on a phone and with colour blindness."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASS_COLORS = (
    *("#dd4488", "#007766", "#553377", "#dd9988", "#0055ff"),
    *("#880033", "#aaaa00", "#55bbbb", "#9999ff", "#886611"),
)
"""Ten colours on white, none nearly black or grey, and different to colour-blind readers.

The smallest CIEDE2000 difference of two colours is 22 for most readers, and 15 for readers without
one kind of cone (simulated as in Machado et al., 2009). A search maximised the smallest difference;
classes that are often confused, such as 7 and 9, then got colours that differ most.
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


def font_file() -> str:
    """Returns the file of the figures' font; importing matplotlib would take half a second."""
    file = "matplotlib/mpl-data/fonts/ttf/DejaVuSans.ttf"
    return str(distribution("matplotlib").locate_file(file))


def percent(probability: float) -> str:
    """Returns a probability as text, rounded down: only what predictions.csv calls 1 is 100.0%."""
    return f"{math.floor(1000 * round(probability, 6)) / 10:.1f}%"


def class_color(number: int) -> str:
    """Returns the colour of a class, the same in all figures; colours repeat after ten classes."""
    return CLASS_COLORS[number % len(CLASS_COLORS)]


def to_png(figure: Figure) -> bytes:
    """Returns a figure as PNG data; equal figures give equal bytes."""
    content = io.BytesIO()
    with figure_style():
        figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def shares_of_rows(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Divides counts (K, K) by the totals of their rows; a row without samples is 0."""
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares
