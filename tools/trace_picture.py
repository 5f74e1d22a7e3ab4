"""Draws what `./run trace` recorded: a lane for each rank, from top to bottom in order of time."""

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from tools.shares_table import in_bytes
from tools.trace_table import Event, Row, place_of, reading_of, rows_of

#: A picture of up to four lanes can be read at a width of 360 pixels.
WIDTH, LANE, MARGIN, LINE, FONT = 720, 180, 64, 24, 18
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
    taken: list[list[tuple[int, int]]] = [[]]
    height = LINE + 8 if any(event["kind"] == "phase" for event in row.values()) else 0
    for first, last, event, label in _bars(row):
        free = [all(b < first or last < a for a, b in spans) for spans in taken]
        number = free.index(True) if True in free else len(taken)
        taken[number : number + 1] = [[*(taken[number : number + 1] or [[]])[0], (first, last)]]
        top = y + number * (LINE + 18)
        height = max(height, top - y + LINE + 18)
        out += _bar(event, label, [middles[rank] for rank in _ends(event, first, last)], top)
    for rank, event in row.items():
        if event["kind"] == "phase":
            style = STYLES.get(event["phase"].split()[0], STYLES[""])
            out.append(
                f'<rect x="{middles[rank] - lane // 2 + 4}" y="{y + 2}" width="{lane - 8}" '
                f'height="{LINE + 2}" rx="4" {style}/>'
            )
            out.append(_text(middles[rank], y + LINE - 3, event["phase"]))
    return out, height


def _bars(row: Row) -> Iterator[tuple[int, int, Event, str]]:
    """Yields each communication of a row once: its first and last rank, and its words."""
    seen = set()
    for rank, event in row.items():
        if event["kind"] == "send":
            ends = sorted((rank, event["peer"]))
            yield *ends, event | {"from": rank}, f"{event['role']} {in_bytes(event['bytes'])}"
        elif "group" in event and "peer" not in event and (key := str(event["ranks"])) not in seen:
            seen.add(key)
            sizes = {row[one]["bytes"] for one in event["ranks"] if one in row}
            size = " to ".join(in_bytes(some) for some in sorted({min(sizes), max(sizes)}))
            label = f"{event['kind']} {size}, {event['group']}"
            yield event["ranks"][0], event["ranks"][-1], event, label


def _ends(event: Event, first: int, last: int) -> list[int]:
    if "from" in event:
        return [event["from"], event["peer"]]
    return list(event["ranks"])


def _bar(event: Event, label: str, places: Sequence[int], top: int) -> list[str]:
    """Returns an arrow from one rank to another, or a bar with a dot for each rank."""
    y = top + LINE + 6
    stroke = _stroke(event["group"] if "from" not in event else "")
    out = [f'<path d="M{places[0]},{y} H{places[-1]}" {stroke}/>']
    if "from" in event:
        way = 10 if places[0] > places[-1] else -10
        head = f"M{places[-1] + way},{y - 6} L{places[-1]},{y} L{places[-1] + way},{y + 6}"
        out.append(f'<path d="{head}" {_stroke()}/>')
    else:
        out += [f'<circle cx="{x}" cy="{y}" r="5" fill="#444"/>' for x in places]
    middle = (places[0] + places[-1]) // 2
    return [*out, _text(middle, top + LINE - 5, label)]


def _stroke(group: str = "") -> str:
    return f'fill="none" stroke-width="2" {LINES.get(group, LINES[""])}'


def _text(x: int, y: int, text: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' * bold
    halo = 'stroke="white" stroke-width="4" paint-order="stroke"'
    return f'<text x="{x}" y="{y}" text-anchor="middle" {halo}{weight}>{escape(text)}</text>'
