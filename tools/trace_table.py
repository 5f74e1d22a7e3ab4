"""Writes what `./run trace` recorded as a table with one column for each rank."""

import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Any

from .shares_table import aligned, in_bytes, listed

#: Ranks in a block of the table, and its widths with at most two ranks, and with more.
BLOCK, NARROW, WIDE = 4, 80, 126
#: The left column, if rows are repeated.
MARGIN = 6
#: Rows of a repeated block.
LONGEST = 8
#: Of one rank, a list of its events; of a row, one event for each rank that has one.
Event = dict[str, Any]
Row = dict[int, Event]


def align(lists: Sequence[Sequence[Event]]) -> list[Row]:
    """Puts the events of all ranks into rows, in order of time.

    Each event gets the first row after the events before it. The events of one collective, or a
    send and its receive, share a row; those of one call of Megatron for sends and receives may
    change places.

    Args:
        lists: The events of each rank, in order.
    """
    waiting = [
        [*zip(keys_of(rank, events), events, strict=True)] for rank, events in enumerate(lists)
    ]
    members = defaultdict(set)
    for rank, pairs in enumerate(waiting):
        for key, _ in pairs:
            members[key].add(rank)
    rows: defaultdict[int, Row] = defaultdict(dict)
    free = [0] * len(lists)
    while any(waiting):
        fronts = [{key for key, _ in front(pairs)} for pairs in waiting]
        keys = sorted({key for keys in fronts for key in keys}, key=str)
        ready = [key for key in keys if all(key in fronts[rank] for rank in members[key])]
        for key in ready or keys[:1]:  # an order that no rows have: without the other ranks
            ranks = [rank for rank in members[key] if key in fronts[rank]]
            row = max(free[rank] for rank in ranks)
            for rank in ranks:
                pair = next(pair for pair in waiting[rank] if pair[0] == key)
                waiting[rank].remove(pair)
                rows[row][rank] = pair[1]
                free[rank] = row + 1
            members[key] -= {*ranks}
    return [rows[number] for number in sorted(rows)]


def front(pairs: Sequence[tuple[Any, Event]]) -> list[tuple[Any, Event]]:
    """Returns the next event, with those of the same call of Megatron."""
    call = pairs[0][1].get("call") if pairs else None
    same = [pair for pair in pairs if call and pair[1].get("call") == call]
    return same or [*pairs[:1]]


def keys_of(rank: int, events: Iterable[Event]) -> Iterator[tuple[Any, ...]]:
    """Yields a key for each event, which the events of other ranks share that belong to it."""
    counts: defaultdict[Any, int] = defaultdict(int)
    for event in events:
        if "peer" in event:
            ends = (rank, event["peer"])
            key: Any = (*(ends if event["kind"] == "send" else ends[::-1]), event["role"])
        else:
            key = (event["group"], *event["ranks"]) if "group" in event else rank
        counts[key] += 1
        yield key, counts[key]


def fold(rows: Sequence[Any], words: Callable[[Any], Any]) -> list[tuple[int, list[Any]]]:
    """Finds repetitions: returns blocks of rows, each with the number of times that it comes.

    Args:
        rows: The rows.
        words: Returns what is shown of a row, by which rows are compared.
    """
    shown, found, place = [*map(words, rows)], [], 0
    while place < len(rows):
        best, length = 1, 1
        for size in range(1, LONGEST + 1):
            block, times = shown[place : place + size], 1
            while block == shown[place + times * size : place + (times + 1) * size]:
                times += 1
            if times > 1 and times * size > best * length:
                best, length = times, size
        found.append((best, [*rows[place : place + length]]))
        place += best * length
    return found


def words_of(event: Event) -> str:
    """Returns an event in words."""
    if event["kind"] == "phase":
        return f"-- {event['phase']}"
    size = in_bytes(event["bytes"])
    if "peer" in event:
        way = "to" if event["kind"] == "send" else "from"
        return f"{event['kind']} {event['role']} {size} {way} {event['peer']}"
    ranks = "" if event["group"] == "all" else f" {' '.join(map(str, event['ranks']))}"
    return f"{event['kind']} {size} {event['group']}{ranks}"


def rows_of(traces: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[tuple[int, list[Row]]]:
    """Returns the rows of some ranks without barriers, and with repetitions folded."""
    lists = [[one for one in trace["events"] if one["kind"] != "barrier"] for trace in traces]
    rows = ({rank: row[rank] for rank in ranks if rank in row} for row in align(lists))
    return fold(
        [row for row in rows if row],
        lambda row: {rank: words_of(event) for rank, event in row.items()},
    )


def block_lines(traces: Sequence[dict[str, Any]], ranks: Sequence[int]) -> Iterator[str]:
    """Yields the lines of some ranks: coordinates, samples, and events."""
    chosen, folded = [traces[rank] for rank in ranks], rows_of(traces, ranks)
    margin = MARGIN * any(times > 1 for times, _ in folded)
    most = ((NARROW if len(ranks) <= 2 else WIDE) - margin) // len(ranks)
    cells = [words_of(event) for _, rows in folded for row in rows for event in row.values()]
    width = min(most, max(map(len, [*cells, *map(reading_of, chosen)])) + 2)

    def line(cells: Sequence[str], mark: str = "") -> Iterator[str]:
        parts = [textwrap.wrap(cell, width - 1, subsequent_indent="  ") for cell in cells]
        for number, texts in enumerate(zip_longest(*parts, fillvalue="")):
            text = "".join(f"{one:<{width}}" for one in texts)
            left = mark if number == 0 else "|" * bool(mark)
            yield f"{left + ' ' if margin else '':>{margin}}{text}".rstrip()

    yield from line([f"rank {rank}" for rank in ranks])
    yield from line([place_of(trace) for trace in chosen])
    yield from line([reading_of(trace) for trace in chosen])
    for times, rows in folded:
        for number, row in enumerate(rows):
            mark = (f"{times} x |" if number == 0 else "|") if times > 1 else ""
            yield from line([words_of(row[rank]) if rank in row else "" for rank in ranks], mark)


def place_of(trace: dict[str, Any]) -> str:
    """Returns the coordinates of a rank in words, of the kinds of parallelism that are used."""
    words = [f"{name} {rank}" for name, (rank, size) in trace["place"].items() if size > 1]
    return ", ".join(words) or "the only rank"


def weight_lines(traces: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields a table of the weights' shapes; ranks with equal ones share a column."""
    columns: dict[str, list[int]] = {}
    cells: list[dict[str, str]] = []
    for rank, trace in enumerate(traces):
        shapes: dict[str, list[str]] = defaultdict(list)
        for name, *sizes in trace["weights"]:
            own, whole = (" x ".join(map(str, size)) for size in sizes)
            shown = own if own == whole else f"{own} of {whole}"
            shapes[re.sub(r"\.\d+\.", ".*.", name.replace("decoder.", ""))].append(shown)
        cells.append(
            {
                name: some[0] + f" ({len(some)} times)" * (len(some) > 1)
                for name, some in shapes.items()
            }
        )
        columns.setdefault(str(cells[-1]), []).append(rank)
    groups = [*columns.values()]
    names = dict.fromkeys(name for one in groups for name in cells[one[0]])
    table = [("weight", *(_ranks(ranks) for ranks in groups))]
    table += [(name, *(cells[one[0]].get(name, "") for one in groups)) for name in names]
    yield from aligned(table)


def reading_of(trace: dict[str, Any]) -> str:
    """Returns what a rank reads in words: the samples, or a letter for its data."""
    data = f"data {trace['data']}" if trace["data"] else "no data"
    return f"samples {listed(trace['samples'])}" if trace["samples"] else data


def reading_lines(traces: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields which ranks read equal samples."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, trace in enumerate(traces):
        found[str(trace["samples"] or trace["data"])].append(rank)
    text = "; ".join(
        f"{_ranks(ranks)} read{'s' * (len(ranks) == 1)} {reading_of(traces[ranks[0]])}"
        for ranks in found.values()
    )
    yield from textwrap.wrap(text[0].upper() + text[1:] + ".", NARROW)
    if any(len({traces[rank]["data"] for rank in ranks}) > 1 for ranks in found.values()):
        yield "Of equal samples, each context-parallel rank reads its own tokens."


def loss_lines(traces: Sequence[dict[str, Any]], printed: str) -> Iterator[str]:
    """Yields the losses of the ranks, their mean, and what the program printed."""
    losses = {n: trace["loss"] for n, trace in enumerate(traces) if trace["loss"] is not None}
    found: dict[str, list[int]] = {}
    for rank, loss in losses.items():
        found.setdefault(f"{loss:.9f}", []).append(rank)
    said = "; ".join(f"{_ranks(ranks)} {loss}" for loss, ranks in found.items())
    tokens = [traces[rank]["tokens"] or 1 for rank in losses]
    mean = sum(a * b for a, b in zip(losses.values(), tokens, strict=True)) / (sum(tokens) or 1)
    yield from textwrap.wrap(f"Loss: {said}; the mean of all: {mean:.9f}.", NARROW)
    if printed:
        yield f"The program prints: {printed}"


def _ranks(ranks: Sequence[int]) -> str:
    first, _, last = listed(ranks).rpartition(", ")
    return f"rank{'s' * (len(ranks) > 1)} {f'{first} and {last}' if first else last}"


def description(program: str, traces: Sequence[dict[str, Any]], printed: str) -> Iterator[str]:
    """Yields the lines that `./run trace` prints."""
    place = traces[0]["place"] | {"expert": (0, 1)}  # they are the ranks of data and context
    sizes = [f"{name} {size}" for name, (_, size) in place.items() if size > 1]
    layout = f": {' x '.join(sizes)}".replace("stage", "pipeline") if sizes else ""
    yield f"{program}, {len(traces)} process{'es' * (len(traces) > 1)}{layout}."
    yield "\nEach rank has these weights, or this part of the whole weight:\n"
    yield from weight_lines(traces)
    yield "\nThe step, from top to bottom: its parts (--), and what ranks communicate.\n"
    for _, block in groupby(range(len(traces)), lambda rank: rank // BLOCK):
        yield from block_lines(traces, [*block])
        yield ""
    yield from reading_lines(traces)
    yield from loss_lines(traces, printed)
