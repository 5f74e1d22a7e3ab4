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

# A phone shows a figure 320 pixels wide. Its text then has 10 pixels.
STYLE: dict[str, Any] = {
    "figure.figsize": (6, 5.6),
    "figure.dpi": 120,
    "font.family": "DejaVu Sans",  # included in matplotlib
    "font.size": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    **{f"axes.spines.{side}": False for side in ("top", "right", "bottom", "left")},
    **{"xtick.major.size": 0, "ytick.major.size": 0},
    **{"xtick.labelsize": 11.5, "ytick.labelsize": 11.5},
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


def to_png(picture: Figure | NDArray[np.uint8]) -> bytes:
    """Returns a figure, or a picture of numbers, as PNG data; equal ones give equal bytes."""
    from PIL import Image

    content = io.BytesIO()
    if isinstance(picture, np.ndarray):
        Image.fromarray(picture).save(content, "PNG")
    else:
        with figure_style():
            picture.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
