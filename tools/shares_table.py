"""Writes the shares of a job's ranks as tables."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megakit.job.layout import Layout

    from .shares import Share

#: A job of at most so many ranks gets a row for the coordinates of each rank.
FEW = 16
PLACES = ("rank", "tensor rank", "data rank", "stage")
STORED: tuple[str, ...] = ("ranks", "stage", "parameters", "weights", "gradients", "optimizer")


def description(
    model: str, layout: "Layout", precision: str, shares: Sequence["Share"]
) -> Iterator[str]:
    """Yields the lines that `./run layout` prints.

    The coordinates of each rank come first; of a large job, the rule for them. Ranks of a stage
    with equal figures share a row.
    """
    micro = layout.micro_batch_size
    number = layout.global_batch_size // (layout.data * micro)
    yield f"{model}, {layout}."
    yield (
        f"Each rank computes {number:,} micro batch{'es' * (number > 1)} of {micro:,} "
        f"sample{'s' * (micro > 1)} in a step; precision {precision}."
    )
    if layout.world_size <= FEW:
        places = (
            (rank, share.tensor_rank, data_rank, share.pipeline_rank)
            for share in shares
            for data_rank, rank in enumerate(share.ranks)
        )
        yield ""
        yield from aligned([PLACES, *sorted(places)])
    else:
        last = shares[-layout.tensor].ranks  # of the last stage, on tensor rank 0
        step = last.start // max(1, layout.pipeline - 1)
        stages = f" + {step} x stage" * (layout.pipeline > 1)
        yield f"Rank = tensor rank + {last.step} x data rank{stages}."
    stored = [STORED]
    for _, group in groupby(shares, lambda share: (share.pipeline_rank, share.figures)):
        equal = list(group)
        ranks = listed(sorted(rank for share in equal for rank in share.ranks))
        parameters, *sizes = equal[0].figures
        stage = str(equal[0].pipeline_rank)
        stored.append((ranks, stage, f"{parameters:,}", *map(in_bytes, sizes)))
    yield "\nA rank stores, besides the activations of its micro batches:\n"
    yield from aligned(stored)


def aligned(rows: Sequence[tuple[object, ...]]) -> Iterator[str]:
    """Yields the rows as lines with aligned columns, the first one to the left."""
    first, *widths = (max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True))
    for row in rows:
        cells = [f"  {cell:>{width}}" for cell, width in zip(row[1:], widths, strict=True)]
        yield f"{row[0]:<{first}}{''.join(cells)}".rstrip()


def listed(numbers: Sequence[int]) -> str:
    """Lists rising numbers by intervals: `0 to 3, 8 to 11`; of many intervals, the first three."""
    intervals = [
        [number for _, number in group]
        for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    words = [f"{i[0]} to {i[-1]}" if len(i) > 2 else ", ".join(map(str, i)) for i in intervals]
    if len(words) > 3:
        words = [*words[:3], f"... ({len(numbers):,} in all)"]
    return ", ".join(words)


def in_bytes(number: int) -> str:
    """Returns a number of bytes in a decimal unit, with three figures."""
    value, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
