"""Boxes, arrows and text in one style, of which the pictures of the course consist.

Each program make_*.py beside this file draws some of them, and returns them by `pictures()`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, LINE, GAP = 380, 17, 24
#: By kind: fill and line on a light screen, both on a dark one, and the dashes of a path.
COLORS = {
    "tensor": ("#d7e8fb", "#1f6fb5", "#23486c", "#6cb2f5", "6 3"),
    "sequence": ("#d3f0ee", "#117a73", "#17554f", "#5cc9c0", ""),
    "pipeline": ("#eadcf8", "#7a4fb0", "#4a3560", "#b894e6", "9 3"),
    "data": ("#fdebc8", "#9a6a00", "#5f470f", "#e0b04a", "2 3"),
    "context": ("#dff2d8", "#3f7f35", "#31552b", "#86c977", ""),
    "expert": ("#f8d9e3", "#a8345d", "#642f44", "#eb86a9", ""),
    "whole": ("#e9ecef", "#57606a", "#3a4149", "#9aa4ae", ""),
}
STYLE = """text{{font:13px system-ui,sans-serif;text-anchor:middle;fill:#1f2328}}
.start{{text-anchor:start}}.bold{{font-weight:bold}}path{{stroke-width:1.5}}
{light}.line{{fill:none}}.part{{stroke:none}}
@media(prefers-color-scheme:dark){{text{{fill:#e6edf3}}
{dark}.line{{fill:none}}.part{{stroke:none}}}}"""


class Row(NamedTuple):
    """Some boxes beside each other.

    Attributes:
        kind: Of the boxes, a key of `COLORS`; empty for text alone.
        words: What is in each box. One box is as wide as the picture: the ranks communicate.
        split: By what the ranks divide what is in the boxes: by its "columns" or its "rows".
    """

    kind: str
    words: Sequence[str]
    split: str = ""


class Picture:
    """A picture, which grows downward.

    Args:
        name: Of the file.
        title: What it shows.
    """

    def __init__(self, name: str, title: str) -> None:
        self.name, self.title, self.bottom = name, title, 0.0
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Writes lines around a point, or with the style "start" to its right.

        Lines that begin with * are bold.
        """
        top = y + 4.5 - words.count("\n") * LINE / 2
        for line in words.splitlines():
            css = f"{style} bold" if line.startswith("*") else style
            at = f'class="{css}" x="{x:g}" y="{top:g}"'
            self.parts.append(f"<text {at}>{escape(line.lstrip('*'))}</text>")
            self.bottom = max(self.bottom, top + 6)
            top += LINE

    def box(
        self, x: float, y: float, width: float, height: float, css: str, words: str = ""
    ) -> None:
        """Draws a box with text; `css` is a key of `COLORS`, and "line" if it is not filled."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect class="{css}" {size} rx="3"/>')
        self.text(x + width / 2, y + height / 2, words)
        self.bottom = max(self.bottom, y + height)

    def key(self, x: float, y: float, css: str, words: str) -> None:
        """Says what a color means."""
        self.box(x, y - 7, 20, 14, css)
        self.text(x + 27, y, words, "start")

    def path(self, points: str, kind: str = "whole") -> None:
        """Draws lines; `points` is a path of SVG."""
        self.parts.append(f'<path class="{kind} line" d="{points}"/>')

    def arrow(self, x: float, y: float, length: float) -> None:
        """Draws an arrow downward or, with a negative length, upward."""
        tip = 5 if length > 0 else -5
        self.path(f"M{x:g},{y:g}v{length:g}m-4,{-tip}l4,{tip}l4,{-tip}")

    def flow(self, rows: Sequence[Row], back: bool = False) -> None:
        """Draws rows with arrows between them.

        Args:
            rows: From top to bottom.
            back: Whether there are arrows upward, too, for the backward pass.
        """
        for number, (kind, words, split) in enumerate(rows):
            top = self.bottom + (GAP if number and rows[number - 1].kind else 8)
            height = LINE * (1 + max(one.count("\n") for one in words)) + 12 * bool(kind)
            for place, one in enumerate(words):
                width = (WIDTH + 8) / len(words) - 12
                x = 2 + place * (width + 12)
                if split == "columns":
                    self.box(x + place * width / 2, top, width / 2, height, f"{kind} part")
                elif split:
                    self.box(x, top + place * height / 2, width, height / 2, f"{kind} part")
                if kind:
                    self.box(x, top, width, height, f"{kind} {'line' * bool(split)}")
                self.text(x + width / 2, top + height / 2, one)
            for x in (93, 287):
                if number and rows[number - 1].kind:
                    self.arrow(x - 8 * back, top - GAP + 4, GAP - 8)
                    if back:
                        self.arrow(x + 8, top - 4, 8 - GAP)

    def svg(self) -> str:
        """Returns the file's text."""
        light, dark = (
            "".join(
                f".{kind}{{fill:{color[n]};stroke:{color[n + 1]};stroke-dasharray:none}}"
                f"path.{kind}{{stroke-dasharray:{color[4] or 'none'}}}"
                for kind, color in COLORS.items()
            )
            for n in (0, 2)
        )
        size = f'width="{WIDTH}" height="{self.bottom + 4:.0f}"'
        box = f"0 -2 {WIDTH} {self.bottom + 4:.0f}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {size} role="img">'
        style = f"<style>{STYLE.format(light=light, dark=dark)}</style>"
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, style, *self.parts, "</svg>\n"])


def save(pictures: Sequence[Picture]) -> None:
    """Writes the files."""
    for picture in pictures:
        Path(__file__).with_name(f"{picture.name}.svg").write_text(picture.svg())
