"""Draws what `./run trace` recorded: a lane for each rank, from top to bottom in order of time."""

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from .shares_table import in_bytes
from .trace_table import Row, place_of, reading_of, rows_of

#: A picture of up to four lanes can be read at a width of 360 pixels.
WIDTH, LANE, MARGIN, LINE, BAR, FONT = 720, 180, 64, 24, 42, 18
#: Fills and borders of the parts of a step; borders also differ, for readers who cannot
#: distinguish the colors.
STYLES = {
    "forward": 'fill="#e6f4e3" stroke="#3f7f35"',
    "backward": 'fill="#d7e8fb" stroke="#1f6fb5" stroke-dasharray="6 3"',
    "": 'fill="#fdf0d5" stroke="#9a6a00" stroke-dasharray="2 3"',
}
LINES = {
    "tensor": 'stroke="#1f6fb5" stroke-dasharray="6 3"',
    "data": 'stroke="#9a6a00" stroke-dasharray="2 3"',
    "": 'stroke="#444"',
}


def draw(program: str, traces: Sequence[dict[str, Any]]) -> str:
    """Returns the picture as SVG."""
    longest = max(len(event["phase"]) for trace in traces for event in trace["events"])
    lane = max(LANE, 11 * longest, WIDTH // len(traces))
    middles = [MARGIN + lane // 2 + lane * rank for rank in range(len(traces))]
    total = MARGIN + lane * len(traces) + 8
    heads = [
        [
            *(f"rank {rank}", *place_of(trace).split(", ")),
            *textwrap.wrap(reading_of(trace), lane // 9),
        ]
        for rank, trace in enumerate(traces)
    ]
    out = [
        _text(middle, 64 + LINE * number, word, bold=number == 0)
        for middle, words in zip(middles, heads, strict=True)
        for number, word in enumerate(words)
    ]
    top = y = 64 + LINE * max(map(len, heads))
    for times, rows in rows_of(traces, range(len(traces))):
        begin = y
        for row in rows:
            lines, height = _row(row, middles, lane, y)
            out += lines
            y += height
        if times > 1:
            out.append(f'<path d="M{MARGIN - 6},{begin + 4} h-6 V{y - 4} h6" {_stroke()}/>')
            out.append(_text(MARGIN - 38, (begin + y) // 2 + 6, f"{times} x"))
    for middle in reversed(middles):
        out.insert(0, f'<path d="M{middle},{top - 12} V{y}" stroke="#ddd" stroke-width="2"/>')
    title = f"One training step of {program} on {len(traces)} ranks"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {y + 16}" '
            f'font-family="sans-serif" font-size="{FONT}" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            "<desc>Time runs down. Boxes: forward and backward passes of a micro batch. "
            "Bars: collectives of the ranks with a dot. Arrows: sends.</desc>",
            f'<rect width="{total}" height="{y + 16}" fill="white"/>',
            _text(total // 2, 30, title, bold=True),
            *out,
            "</svg>\n",
        ]
    )


def _row(row: Row, middles: Sequence[int], lane: int, y: int) -> tuple[list[str], int]:
    """Returns the elements of a row and its height; bars that cross are below each other."""
    out: list[str] = []
    height = 0
    for rank, event in row.items():
        if event["kind"] == "phase":
            style = STYLES.get(event["phase"].split()[0], STYLES[""])
            out.append(
                f'<rect x="{middles[rank] - lane // 2 + 4}" y="{y + 2}" width="{lane - 8}" '
                f'height="{LINE + 2}" rx="4" {style}/>'
            )
            out.append(_text(middles[rank], y + LINE - 3, event["phase"]))
            height = LINE + 8
    ends = [-1]  # of the last bar of each line
    for ranks, group, label in sorted(_bars(row), key=lambda bar: min(bar[0])):
        line = next((n for n, end in enumerate(ends) if end < min(ranks)), len(ends))
        ends[line : line + 1] = [max(ranks)]
        out += _bar([middles[rank] for rank in ranks], group, label, y + line * BAR)
        height = max(height, len(ends) * BAR)
    return out, height


def _bars(row: Row) -> Iterator[tuple[list[int], str, str]]:
    """Yields each communication of a row once: its ranks, its group (none: a send), its words."""
    for rank, event in row.items():
        size = in_bytes(event.get("bytes", 0))
        if event["kind"] == "send":
            yield [rank, event["peer"]], "", f"{event['role']} {size}"
        elif "ranks" in event and "peer" not in event and rank == event["ranks"][0]:
            most = in_bytes(max(row[one].get("bytes", 0) for one in event["ranks"] if one in row))
            size = size if size == most else f"up to {most}"
            yield event["ranks"], event["group"], f"{event['kind']} {size}, {event['group']}"


def _bar(places: Sequence[int], group: str, label: str, top: int) -> list[str]:
    """Returns an arrow from one rank to another, or a bar with a dot for each rank."""
    y, first, last = top + LINE + 6, places[0], places[-1]
    out = [f'<path d="M{first},{y} H{last}" {_stroke(group)}/>']
    if group:
        out += [f'<circle cx="{x}" cy="{y}" r="5" fill="#444"/>' for x in places]
    else:
        back = last + (10 if first > last else -10)
        out.append(f'<path d="M{back},{y - 6} L{last},{y} L{back},{y + 6}" {_stroke()}/>')
    return [*out, _text((first + last) // 2, top + LINE - 5, label)]


def _stroke(group: str = "") -> str:
    return f'fill="none" stroke-width="2" {LINES.get(group, LINES[""])}'


def _text(x: int, y: int, text: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' * bold
    return f'<text x="{x}" y="{y}" text-anchor="middle"{weight}>{escape(text)}</text>'
