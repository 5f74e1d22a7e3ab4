"""How time and memory grow with the batch, the number of samples, and the model's width.

    python benchmarks/growth.py --data-dir PATH [--rounds 3] [--write]

Ours through its script, plain PyTorch beside it: what grows in both is the mathematics. Each point
is a process of its own. `--write` puts the table into RESULTS.md and draws docs/images/growth.svg.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import REPOSITORY, machine, short, write_section
from steps import TITLES, train

PICTURE = REPOSITORY / "docs" / "images" / "growth.svg"
COLOUR = {"ours": "#1f6fb4", "torch": "#d9822b"}
PANEL, HEIGHT, GAP, MARGIN = 250, 170, 70, 60


@dataclass
class Growth:
    """One thing that grows.

    Attributes:
        title: What it is.
        points: Its value, the job's settings, and how many steps are timed.
        peers: Who is measured.
        found: Milliseconds per step and peak memory in MB, of each round, by peer and value.
    """

    title: str
    points: dict[int, tuple[dict[str, int], int]]
    peers: tuple[str, ...] = ("ours", "torch")
    found: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)

    def medians(self, peer: str, which: int) -> list[float]:
        """Of the milliseconds (0) or the memory (1), one for each point."""
        return [
            statistics.median(values[which] for values in self.found[peer, point])
            for point in self.points
        ]


def growths() -> list[Growth]:
    """What is measured; where a step is long, few steps tell enough."""
    sizes = {32: 300, 128: 300, 512: 200, 2048: 100, 8192: 40}
    widths = {64: 300, 256: 200, 1024: 60, 4096: 25}
    return [
        Growth("batch size", {size: ({"batch_size": size}, n) for size, n in sizes.items()}),
        Growth(
            "training samples",
            {55_000 * times: ({"repeats": times}, 300) for times in (1, 10, 109)},
            peers=("ours",),
        ),
        Growth("width", {width: ({"hidden_size": width}, n) for width, n in widths.items()}),
    ]


def measure(growth: Growth, data_dir: Path) -> None:
    """One round: each point of each peer, in turn."""
    for point, (settings, steps) in growth.points.items():
        for peer in growth.peers:
            warm_up = max(5, steps // 5)
            job: dict[str, Any] = {"steps": steps + warm_up, "warm_up": warm_up, **settings}
            told = train(peer, 1, data_dir=data_dir, **job)
            values = 1000 / told["steps_per_second"], told["megabytes"]
            growth.found.setdefault((peer, point), []).append(values)


def table(growth: Growth) -> list[str]:
    """Lines of a table: each point, and how it compares with the one before."""
    heads = [f"{TITLES[peer]}, {unit}" for peer in growth.peers for unit in ("ms per step", "MB")]
    lines = [f"| {growth.title} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    columns = [growth.medians(peer, which) for peer in growth.peers for which in (0, 1)]
    for row, point in enumerate(growth.points):
        cells = [short(column[row]) for column in columns]
        lines.append(f"| {point:,} | {' | '.join(cells)} |")
    first, *_, last = growth.points
    times = [f"{short(column[-1] / column[0])} times" for column in columns]
    return [*lines, f"| {short(last / first)} times | {' | '.join(times)} |"]


def panel(x: int, y: int, growth: Growth, which: int) -> list[str]:
    """One diagram, both axes logarithmic; the grey line is what proportional would be."""
    points = list(growth.points)
    series = {peer: growth.medians(peer, which) for peer in growth.peers}
    values = [value for line in series.values() for value in line]
    low, high = floor_of(min(values)), max(floor_of(max(values)) * 10, floor_of(min(values)) * 100)

    def place(point: float, value: float) -> tuple[float, float]:
        across = math.log(point / points[0]) / math.log(points[-1] / points[0])
        up = math.log(value / low) / math.log(high / low)
        return x + 10 + across * (PANEL - 20), y + HEIGHT * (1 - up)

    out = [f'<rect x="{x}" y="{y}" width="{PANEL}" height="{HEIGHT}" fill="none" stroke="#888"/>']
    power = low
    while power <= high:
        _, level = place(points[0], power)
        out.append(f'<path d="M{x},{level:.0f} h{PANEL}" stroke="#ddd"/>')
        out.append(text(x - 6, level + 4, short(power), "end"))
        power *= 10
    for point in points:
        across, _ = place(point, low)
        out.append(text(across, y + HEIGHT + 16, round_name(point)))
    start = series["ours"][0]
    end = min(points[-1], points[0] * high / start)
    out.append(polyline([place(points[0], start), place(end, start * end / points[0])], "#bbb"))
    for peer, line in series.items():
        places = [place(*pair) for pair in zip(points, line, strict=True)]
        out.append(polyline(places, COLOUR[peer]))
        dot = f'r="3" fill="{COLOUR[peer]}"'
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" {dot}/>' for a, b in places]
    out.append(text(x + PANEL / 2, y - 8, f"{('ms per step', 'peak memory, MB')[which]}"))
    if which == 1:
        out.append(text(x + PANEL / 2, y + HEIGHT + 36, growth.title))
    return out


def floor_of(value: float) -> float:
    """The power of ten below."""
    return float(10 ** math.floor(math.log10(value)))


def round_name(number: int) -> str:
    """A number in few characters: 5,995,000 is 6M."""
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if number >= unit and number % 1024:
            return f"{number / unit:.1f}".removesuffix(".0") + name
    return str(number)


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'


def polyline(places: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def draw(all_growths: Sequence[Growth]) -> str:
    """The picture: a column for each growth, time above memory."""
    width = MARGIN + len(all_growths) * (PANEL + GAP)
    height = 2 * (HEIGHT + GAP) + MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" role="img" '
        'aria-label="Time and memory against batch size, samples and width">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, growth in enumerate(all_growths):
        x = MARGIN + column * (PANEL + GAP)
        for which in (0, 1):
            out += panel(x, 30 + which * (HEIGHT + GAP), growth, which)
    x = MARGIN
    legend = [(TITLES[peer], colour) for peer, colour in COLOUR.items()]
    for words, colour in [*legend, ("in proportion", "#bbb")]:
        out.append(f'<rect x="{x}" y="{height - 22}" width="14" height="4" fill="{colour}"/>')
        out.append(text(x + 20, height - 16, words, "start"))
        x += 160
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="How time and memory grow.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="draw it there, whether or not --write")
    parser.add_argument("--write", action="store_true", help="put it into RESULTS.md and docs")
    options = parser.parse_args()
    all_growths = growths()
    for number in range(options.rounds):
        for growth in all_growths:
            measure(growth, options.data_dir)
        print(f"round {number + 1} done", file=sys.stderr, flush=True)
    caption = machine("nemo_toolkit", "megatron-core").replace("; median, lowest to highest", "")
    caption += f" Medians of {options.rounds} rounds, one thread, bf16-mixed. Batch size 128"
    lines = ["## Growth", "", f"{caption} and width 64, except in the table that varies them."]
    for growth in all_growths:
        lines += ["", *table(growth)]
    print("\n".join(lines))
    if options.picture:
        options.picture.write_text(draw(all_growths))
    if options.write:
        PICTURE.write_text(draw(all_growths))
        write_section("growth", "\n".join([*lines, "", "![Growth](../docs/images/growth.svg)"]))


if __name__ == "__main__":
    main()
