"""A training step as all its ranks have written it, put together."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from .pieces import part_of, put_together

#: Weights that are listed in a finding.
MOST = 8


class Copy(NamedTuple):
    """A rank's part of a value, beside the same part of the value of one process."""

    rank: int
    offset: tuple[int, ...]
    value: Tensor
    right: Tensor

    @property
    def factor(self) -> float:
        """Returns the number that the right value has to be multiplied with to come nearest."""
        square = float(self.right.square().sum())
        return float((self.value * self.right).sum()) / square if square else math.nan


class Step:
    """One training step of all ranks, as `StepValues` wrote it."""

    def __init__(self, ranks: Sequence[dict[str, Any]]) -> None:
        self.ranks = ranks

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole weight, in the order of the stages and of their models."""
        ranks = sorted(self.ranks, key=lambda rank: rank["place"]["stage"][0])
        return {name: shape for rank in ranks for name, shape, *_ in rank["pieces"]}

    @cached_property
    def lines(self) -> dict[str, str]:
        """The line of code that makes each weight."""
        return {name: line for rank in self.ranks for name, _, _, line, _ in rank["pieces"]}

    def parts(self, kind: str) -> Iterator[tuple[int, str, tuple[int, ...], Any]]:
        """Yields each rank's parts of weights, or of values that belong to them."""
        for number, rank in enumerate(self.ranks):
            values = rank["tensors"].get(kind) or rank[kind]
            for (name, _, offset, *_), value in zip(rank["pieces"], values, strict=True):
                yield number, name, offset, value

    def whole(self, kind: str) -> dict[str, Tensor]:
        """Returns each whole tensor in float64, NaN where no rank has a part of it."""
        pairs = (
            pair
            for rank in self.ranks
            for pair in zip(rank["pieces"], rank["tensors"][kind], strict=True)
        )
        found = put_together(pairs)
        return {name: found[name].double() for name in self.shapes}

    def copies(self, kind: str, right: dict[str, Tensor]) -> dict[str, list[Copy]]:
        """Returns all ranks' parts of each weight's values, beside those of one process."""
        found = defaultdict(list)
        for rank, name, offset, value in self.parts(kind):
            same = part_of(right[name], offset, value.shape)
            found[name].append(Copy(rank, offset, value.double(), same))
        return found

    def with_lines(self, names: Sequence[str]) -> list[str]:
        """Returns weights with the lines that make them."""
        return [f"{name}  {self.lines[name]}" for name in names[:MOST]]

    @cached_property
    def loss(self) -> float:
        """The value whose gradient the step takes."""
        ranks = [rank for rank in self.ranks if rank["losses"] and not rank["place"]["tensor"][0]]
        pairs = [pair for rank in ranks for pair in rank["losses"]]
        tokens = sum(count for _, count in pairs)
        return sum(loss for loss, _ in pairs) / (tokens or len(ranks) or 1)

    def size(self, kind: str) -> int:
        """Returns the number of ranks of a kind of parallelism."""
        return int(self.ranks[0]["place"][kind][1])

    @cached_property
    def samples(self) -> dict[int, dict[int, frozenset[int]]]:
        """The samples that each rank reads, by replica and rank."""
        found: defaultdict[int, dict[int, frozenset[int]]] = defaultdict(dict)
        for number, rank in enumerate(self.ranks):
            if rank["rows"]:
                rows = frozenset(row for batch in rank["rows"] for row in batch)
                found[rank["place"]["data"][0]][number] = rows
        return found


class Finding(NamedTuple):
    """What is wrong: the value, how, what that usually means, and lines with details."""

    value: str
    text: str
    cause: str = ""
    details: Sequence[str] = ()
