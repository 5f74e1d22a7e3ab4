"""Says whether a step under a layout computes what one process computes, and what is wrong first."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Times the rounding of a sum of n random terms, which grows with the root of n.
SAFETY = 4
#: The largest relative difference of an update, where its gradient is no rounding.
UPDATE = 2e-3
KINDS = {
    "tensor": "tensor-parallel",
    "context": "context-parallel",
    "data": "data-parallel",
}


class Copy(NamedTuple):
    """A rank's part of a weight, or of a value that belongs to it.

    Attributes:
        rank: The rank.
        value: The part.
        right: The same part of the value of one process.
    """

    rank: int
    value: Tensor
    right: Tensor


class Finding(NamedTuple):
    """What is wrong: the value, what it is, what that usually means, and lines with details."""

    value: str
    text: str
    cause: str = ""
    details: tuple[str, ...] = ()


class Step:
    """One training step of all ranks, as `StepValues` wrote it."""

    def __init__(self, ranks: Sequence[dict[str, Any]]) -> None:
        self.ranks = ranks

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole weight, in the model's order; stages come in theirs."""
        ordered = sorted(self.ranks, key=lambda rank: rank["place"]["stage"][0])
        return {name: shape for rank in ordered for name, shape, *_ in rank["pieces"]}

    @cached_property
    def lines(self) -> dict[str, str]:
        """The line of the program that makes each weight."""
        return {name: line for rank in self.ranks for name, _, _, line in rank["pieces"]}

    def whole(self, kind: str) -> dict[str, Tensor]:
        """Returns each whole tensor, NaN where no rank has a part of it."""
        found = {name: torch.full(shape, torch.nan).double() for name, shape in self.shapes.items()}
        for rank in self.ranks:
            for (name, _, offset, _), part in zip(rank["pieces"], rank["tensors"][kind], strict=True):
                _part(found[name], offset, part).copy_(part)
        return found

    def copies(self, kind: str, right: dict[str, Tensor]) -> dict[str, list[Copy]]:
        """Returns all ranks' parts of each weight, beside those of whole weights."""
        found: defaultdict[str, list[Copy]] = defaultdict(list)
        for number, rank in enumerate(self.ranks):
            for (name, _, offset, _), part in zip(rank["pieces"], rank["tensors"][kind], strict=True):
                found[name].append(Copy(number, part.double(), _part(right[name], offset, part)))
        return found

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


def _part(whole: Tensor, offset: Sequence[int], part: Tensor) -> Tensor:
    ends = zip(offset, part.shape, strict=True)
    return whole[tuple(slice(first, first + size) for first, size in ends)]


class Judgement:
    """Compares a step with that of one process, which begins with the same weights.

    Attributes:
        bound: The relative difference that rounding explains.
        differences: The largest relative difference of each value.
        findings: What is wrong, the first that is computed first.
        notes: What may be intended.
    """

    def __init__(self, right: Step, step: Step, name: str) -> None:
        self.right, self.step, self.name = right, step, name
        terms = sum(right.ranks[0]["terms"])
        dtype = right.ranks[0]["tensors"]["weight"][0].dtype
        self.terms, self.epsilon = max(terms, 1), torch.finfo(dtype).eps
        self.bound = SAFETY * self.epsilon * math.sqrt(self.terms)
        self.differences: dict[str, float] = {}
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        for check in (self.samples, self.first, self.loss, self.gradients, self.norm, self.update):
            self.findings += check()

    def samples(self) -> Iterator[Finding]:
        """Replicas share the samples of the step; the ranks of one replica read the same."""
        replicas: defaultdict[int, dict[int, set[int]]] = defaultdict(dict)
        for number, rank in enumerate(self.step.ranks):
            if rank["rows"]:
                rows = {row for batch in rank["rows"] for row in batch}
                replicas[rank["place"]["data"][0]][number] = rows
        expected = {row for batch in self.right.ranks[0]["rows"] for row in batch}
        owners: dict[int, int] = {}
        for ranks in replicas.values():
            if len({frozenset(rows) for rows in ranks.values()}) > 1:
                if self.step.size("context") > 1:
                    return  # each has tokens of its own
                yield Finding("samples", f"ranks {_listed(ranks)} of one replica read different samples",
                    "the sampler has to count data-parallel ranks, not all ranks")
                return
            number, rows = next(iter(ranks.items()))
            for row in rows:
                if (other := owners.setdefault(row, number)) != number:
                    yield Finding("samples", f"ranks {other} and {number} are of different replicas, and read "
                        f"the same samples", "the sampler has to divide the samples between data-parallel ranks")
                    return
        if expected and owners.keys() != expected:
            missing, more = len(expected - owners.keys()), len(owners.keys() - expected)
            yield Finding("samples", f"of the {len(expected)} samples of one process, {missing} are not "
                f"read, and {more} others are", "the order or the number of samples depends on the layout")

    def first(self) -> Iterator[Finding]:
        """The weights are those of one process; ranks with the same weight begin with the same."""
        if self.step.shapes != self.right.shapes:
            a, b = self.right.shapes, self.step.shapes
            other = [name for name in {**a, **b} if a.get(name) != b.get(name)]
            sizes = [f"{name}: {[*a.get(name, ())] or 'absent'} in one process, {[*b.get(name, ())] or 'absent'} here" for name in other[:4]]
            yield Finding("weights", f"{len(other)} weights have another name or shape than in one process",
                "sharded_state_dict has to describe the same weights; a vocabulary is padded to a multiple of the ranks", tuple(sizes))
            return
        begun: dict[Any, tuple[int, int]] = {}
        for number, rank in enumerate(self.step.ranks):
            for (name, _, offset, _), value in zip(rank["pieces"], rank["first"], strict=True):
                other, before = begun.setdefault((name, offset), (number, value))
                if before != value:
                    yield Finding("weights", f"{name} is not the same at first on ranks {other} and {number}, which both have it",
                        "draw it from a seed that does not depend on the rank, or broadcast it",
                        (f"made at {self.step.lines[name]}",))
                    return
        left = sorted({text for rank in [*self.step.ranks] for text in rank["left"]})
        if left:
            yield Finding("gradients", "a step begins with gradients of the step before", "", tuple(left[:3]))

    def loss(self) -> Iterator[Finding]:
        """The loss is that of one process, and the same on all tensor-parallel ranks."""
        a, b = self.right.loss, self.step.loss
        self.differences["loss"] = _relative(a, b)
        if not self.differences["loss"] <= self.bound:
            factor = b / a if a else math.nan
            yield Finding("loss", f"{b:.9g}, and {a:.9g} in one process{_times(factor)}", self.sizes(factor)
                or "the forward pass or the loss function depends on the layout")
            return
        found: defaultdict[Any, list[float]] = defaultdict(list)
        for rank in self.step.ranks:
            if rank["losses"]:
                place = rank["place"]
                found[(place["data"][0], place["context"][0])].append(sum(x for x, _ in rank["losses"]))
        for losses in found.values():
            if not max(_relative(losses[0], one) for one in losses) <= self.bound:
                yield Finding("loss", f"tensor-parallel ranks have different losses: {', '.join(f'{x:.9g}' for x in losses)}",
                    "the loss function uses a part of the vocabulary or of the tokens as if it were the whole")

    def sizes(self, factor: float) -> str:
        """Returns which numbers of the layout a factor is."""
        found = []
        for kind, words in KINDS.items():
            size = self.step.size(kind)
            for value, text in ((size, "is the number"), (1 / size, "is one by the number")):
                if size > 1 and _relative(factor, value) < 1e-3:
                    found.append(f"{factor:.4g} {text} of {words} ranks")
        return "; or ".join(found)

    @cached_property
    def scales(self) -> dict[str, float]:
        """What a gradient's differences are relative to: its norm, or that of a usual gradient."""
        gradients = self.right.whole("gradient")
        count = sum(one.numel() for one in gradients.values())
        usual = math.sqrt(sum(float(one.square().sum()) for one in gradients.values()) / max(count, 1))
        return {name: max(float(one.norm()), usual * math.sqrt(one.numel()), 1e-300) for name, one in gradients.items()}

    def gradients(self) -> Iterator[Finding]:
        """Each rank's gradients are its parts of those of one process."""
        if self.step.shapes != self.right.shapes:
            return
        right = self.right.whole("gradient")
        found = self.step.copies("gradient", right)
        errors = {}
        for name in right:
            part = [_error(one, self.scales[name]) for one in found[name]]
            errors[name] = max(part, default=math.inf)
        self.differences["gradients"] = max(errors.values(), default=0.0)
        wrong = [name for name in reversed([*right]) if not errors[name] <= self.bound]
        if not wrong:
            return
        patterns = {name: self.pattern(found[name]) for name in wrong}
        common = {patterns[name] for name in wrong}
        shown = "all weights" if len(wrong) == len(right) else f"{len(wrong)} of {len(right)} weights"
        text, cause = self.told(wrong, [*right], patterns)
        lines = []
        for name in wrong[:8]:
            own = patterns[name][0] if len(common) > 1 else ""
            lines.append(f"{name}: {errors[name]:.1e}{', ' + own if own else ''}  {self.step.lines.get(name, '')}")
        if len(wrong) > 8:
            lines.append(f"and {len(wrong) - 8} before them")
        yield Finding("gradients", f"of {shown}: {text}", cause, tuple(lines))

    def pattern(self, copies: Sequence[Copy]) -> tuple[str, str]:
        """Returns in words how a weight's gradients are wrong, and what that usually means."""
        for kind, words in KINDS.items():
            if self.step.size(kind) == 1:
                continue
            some = self.differing(copies, kind)
            if len(some) < 2 or all(_close(one.value, some[0].value) for one in some):
                continue
            total = sum(one.value for one in some[1:]) + some[0].value
            if _close(total, some[0].right):
                return (f"partial on each {words} rank, and nobody sums it",
                    "does the weight carry `sequence_parallel`?" if kind == "tensor" else "is it among the weights of DistributedDataParallel?")
            if _close(total / len(some), some[0].right):
                return (f"each {words} rank has its own, and nobody averages it",
                    "does finalize_model_grads run, and is the weight in the gradient buffers?")
            return f"different on {words} ranks that share it", "each of them uses it for a part of the work, or reads other values"
        factors = {f"{_factor(one):.4g}" for one in copies}
        if len(factors) == 1 and all(_close(one.value, _factor(one) * one.right) for one in copies):
            factor = _factor(copies[0])
            return f"{factor:.4g} times that of one process", self.sizes(factor)
        if all(_close(one.value, _factor(one) * one.right) for one in copies):
            return f"{' and '.join(sorted(factors))} times those of one process, by rank", ""
        right = [one.rank for one in copies if _close(one.value, one.right)]
        if right:
            return f"right on ranks {_listed(right)} only", ""
        return "different, by no simple factor", ""

    def differing(self, copies: Sequence[Copy], kind: str) -> list[Copy]:
        """Returns copies of one part on ranks that differ in one coordinate only."""
        first, place = copies[0], self.step.ranks[copies[0].rank]["place"]
        others = {word: value for word, value in place.items() if word not in (kind, "expert")}
        return [
            one
            for one in copies
            if one.right.data_ptr() == first.right.data_ptr() and one.right.shape == first.right.shape
            and {k: v for k, v in self.step.ranks[one.rank]["place"].items() if k not in (kind, "expert")} == others
        ]

    def told(self, wrong: list[str], names: list[str], patterns: dict[str, tuple[str, str]]) -> tuple[str, str]:
        """Returns in words what the wrong gradients have in common, and what it usually means."""
        common = {*patterns.values()}
        if len(common) == 1:
            text, cause = common.pop()
            if text.startswith("different, by"):
                common.add((text, cause))
            else:
                return text, cause
        last = names.index(wrong[0])
        if len(wrong) == last + 1 < len(names):
            return ("wrong from here back to the first, and right after it",
                f"the backward pass between {names[last]} and {names[last + 1]}: often an all-reduce that is missing or too much")
        if len(wrong) == len(names):
            return "in different ways", "other samples or another loss; a gradient that is not averaged; the backward pass of the last layer"
        return "these", ""

    def norm(self) -> Iterator[Finding]:
        """All ranks have the same norm and clip by the same factor, those of one process."""
        norms = [rank["norm"] for rank in self.step.ranks if rank["norm"] is not None]
        expected = self.right.ranks[0]["norm"]
        if norms and expected is not None:
            self.differences["norm"] = max(_relative(expected, one) for one in norms)
            if not self.differences["norm"] <= self.bound:
                various = len({f"{one:.5g}" for one in norms}) > 1
                yield Finding("norm", f"{', '.join(sorted({f'{one:.6g}' for one in norms}))}, and {expected:.6g} in one process",
                    "each rank clips by a norm of its own" if various else "a weight that several ranks have counts several times, or the part of some ranks does not count")
        factors = [rank["clipped"] for rank in (*self.right.ranks, *self.step.ranks)]
        if not max(_relative(factors[0], one) for one in factors) <= 10 * self.bound:
            yield Finding("clipping", f"gradients are multiplied by {', '.join(sorted({f'{one:.5g}' for one in factors[1:]}))}, and by {factors[0]:.5g} in one process", "all ranks have to clip by the norm of the whole gradient")

    def update(self) -> Iterator[Finding]:
        """Each weight changes as in one process, where its gradient is more than rounding."""
        if self.step.shapes != self.right.shapes:
            return
        before, after, gradients = (self.right.whole(kind) for kind in ("weight", "updated", "gradient"))
        found = self.step.copies("updated", after)
        wrong = {}
        for name, copies in found.items():
            rounding = self.bound * self.scales[name] / math.sqrt(max(before[name].numel(), 1))
            counts = gradients[name].abs() > 1e3 * rounding
            change = after[name] - before[name]
            scale = UPDATE * change.abs() + 4 * self.epsilon * before[name].abs()
            for one, change_part, scale_part, counted in zip(copies, *(
                [_same_place(one, after[name], tensor) for one in copies] for tensor in (change, scale, counts)), strict=True):
                error = ((one.value - one.right).abs() * counted)
                norm = float((change_part * counted).norm())
                allowed = float((scale_part * counted).norm())
                value = float(error.norm())
                if not value <= allowed:
                    wrong.setdefault(name, (value / max(norm, 1e-300), one.rank))
                self.differences["update"] = max(self.differences.get("update", 0.0), value / norm if norm else 0.0)
        if wrong:
            lines = [f"{name}: {value:.1e} on rank {rank}  {self.step.lines.get(name, '')}" for name, (value, rank) in wrong.items()]
            yield Finding("update", f"of {len(wrong)} of {len(found)} weights", "the optimizer: its learning rate or weight decay for these weights, or gradients that it does not get", tuple(lines[:8]))


def _same_place(one: Copy, whole: Tensor, other: Tensor) -> Tensor:
    """The part of another whole tensor at the place that a copy's right part has in its whole."""
    return other.as_strided(one.right.shape, one.right.stride(), one.right.storage_offset())


def _error(one: Copy, scale: float) -> float:
    value = float((one.value - one.right).norm()) / scale
    return math.inf if math.isnan(value) else value


def _close(a: Any, b: Any) -> bool:
    return bool((a - b).norm() <= 1e-3 * torch.as_tensor(b).norm())


def _factor(one: Copy) -> float:
    square = float((one.right * one.right).sum())
    return float((one.value * one.right).sum()) / square if square else math.nan


def _relative(a: float, b: float) -> float:
    value = abs(a - b) / max(abs(a), abs(b), 1e-300)
    return math.inf if math.isnan(value) else value


def _times(factor: float) -> str:
    return f", {factor:.4g} times it" if abs(factor - 1) > 1e-3 else ""


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, sorted(numbers)))
