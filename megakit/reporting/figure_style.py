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
CLASS_COLORS_ON_DARK = (
    *("#48a9a3", "#d7f81c", "#686f00", "#117760", "#83fbf6"),
    *("#f3277b", "#ffbea3", "#8f23fe", "#bf98ff", "#92a508"),
)
"""Ten colours for a dark background, found in the same way; the smallest difference is 17."""
INK = "#24292f"
GOOD, BAD = "#2f6fb0", "#bd1f01"

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


def luminance(color: str) -> float:
    """Returns the relative luminance of a colour `#rrggbb` as WCAG defines it, from 0 to 1."""
    shares = [value / 255 for value in bytes.fromhex(color[1:])]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two colours as WCAG defines it, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def blend(color: str, share: float, ground: str = "#ffffff") -> str:
    """Returns the colour that covers a share, from 0 to 1, of a background."""
    pairs = zip(bytes.fromhex(color[1:]), bytes.fromhex(ground[1:]), strict=True)
    return "#" + "".join(f"{round(share * c + (1 - share) * g):02x}" for c, g in pairs)


def text_color(background: str) -> str:
    """Returns black or white, whichever has the higher contrast; the contrast is at least 4.58."""
    return max("#000000", "#ffffff", key=lambda text: contrast(text, background))


def to_png(figure: Figure) -> bytes:
    """Returns a figure as PNG data; equal figures give equal bytes."""
    content = io.BytesIO()
    with figure_style():
        figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
