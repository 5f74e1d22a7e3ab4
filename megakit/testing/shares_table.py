"""Writes the shares of a job's ranks as a table."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from megakit.job.layout import Layout

if TYPE_CHECKING:
    from megakit.testing.shares import Share

HEADINGS = (
    *("ranks", "tensor rank", "stage", "parameters", "weights", "gradients", "optimizer"),
    *("tensor", "pipeline", "data"),
)
NOTE = """\
weights, gradients, optimizer: what a rank stores, besides the activations of its micro batches.
tensor: the bytes of all collectives with the tensor-parallel ranks, counted as whole tensors.
pipeline: the bytes sent to the neighbouring stages. data: the bytes of the gradients that are
reduced with the data-parallel ranks. All are sums over the micro batches of a step. Single numbers,
such as the loss, are left out."""


def title(model: str, layout: Layout, precision: str) -> str:
    """Returns the sentence above a table."""
    micro = layout.micro_batch_size
    number = layout.global_batch_size // (layout.data * micro)
    return (
        f"{model}, {layout}; precision {precision}. Each rank computes {number:,} micro "
        f"batch{'es' * (number > 1)} of {micro:,} sample{'s' * (micro > 1)} in a step."
    )


def table(shares: Sequence["Share"], layout: Layout) -> list[str]:
    """Returns the lines of a table; tensor-parallel ranks with equal figures share a row."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for _, group in groupby(shares, lambda share: (share.pipeline_rank, share.figures)):
        equal = list(group)
        ranks = sorted(rank for share in equal for rank in share.ranks(layout))
        number, *sizes = equal[0].figures
        rows.append(
            (
                _listed(ranks),
                _listed([share.tensor_rank for share in equal]),
                str(equal[0].pipeline_rank),
                *(f"{number:,}", *map(in_bytes, sizes)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _listed(numbers: Sequence[int]) -> str:
    """Lists rising numbers by intervals: `0 to 3, 8 to 11`; of many intervals, the first three."""
    intervals = [
        [number for _, number in group]
        for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    words = [f"{i[0]} to {i[-1]}" if len(i) > 1 else str(i[0]) for i in intervals]
    if len(words) > 3:
        words = [*words[:3], f"... ({len(numbers):,} in all)"]
    return ", ".join(words)


def in_bytes(number: int) -> str:
    """Returns a number of bytes in a decimal unit, with three figures."""
    value, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
