"""Says whether a step under a layout computes what one process computes, and what is not."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .pieces import part_of, put_together
from .step_values import checksum
from .steps import MOST, Copy, Finding, Step

#: Times the rounding of a sum of n random terms, which grows with the root of n.
SAFETY = 4
#: The largest relative difference of an update, where the gradient is more than rounding.
UPDATE = 2e-3
KINDS = {
    "tensor": "tensor-parallel",
    "context": "context-parallel",
    "data": "data-parallel",
    "stage": "pipeline-parallel",
}
#: What a wrong gradient usually means, by what its copies on several ranks have in common.
CAUSES = {
    "sequence": "each rank uses it for its own tokens: does it carry `sequence_parallel`?",
    "tensor": "each rank uses it for its own part of the work: pass it through "
    "copy_to_tensor_model_parallel_region, whose backward pass sums",
    "stage": "both stages have it, as a shared embedding, and finalize_model_grads has to sum it",
    "context": "does finalize_model_grads run, and is it in DistributedDataParallel's buffers?",
    "data": "does finalize_model_grads run, and is it in DistributedDataParallel's buffers?",
    "own": "does finalize_model_grads run, and is the weight in the gradient buffers?",
    "various": "each of these ranks uses it for a part of the work, or reads other values",
    "twice": "each tensor-parallel rank has it whole, so their sum is too large: is the weight's "
    "`sequence_parallel` set without need?",
}


class Judgement:
    """Compares a step with that of one process, which begins with the same weights.

    Attributes:
        terms: Numbers that the samples of a step consist of.
        bound: The relative difference that rounding explains in sums of so many terms.
        differences: The largest relative difference of each value.
        findings: What is wrong; first what is computed first.
    """

    def __init__(self, right: Step, step: Step) -> None:
        self.right, self.step = right, step
        one = right.ranks[0]
        self.terms = max(1, one["terms"])
        self.epsilon = max(torch.finfo(part.dtype).eps for part in one["tensors"]["weight"])
        self.bound = SAFETY * self.epsilon * math.sqrt(self.terms)
        self.differences: dict[str, float] = {}
        self.findings: list[Finding] = []
        parts = [self.samples, self.begin]
        if step.shapes == right.shapes:
            parts += [self.loss, self.gradients, self.norm, self.update]
        for part in parts:
            self.findings += part()

    def samples(self) -> Iterator[Finding]:
        """Replicas share the samples of the step; the ranks of one replica read the same."""
        owners: dict[int, int] = {}
        rows = Counter(row for batch in self.right.ranks[0]["rows"] for row in batch)
        equal = {row for row, count in rows.items() if count > 1}  # samples with equal content
        for ranks in self.step.samples.values():
            if len({*ranks.values()}) > 1:
                if self.step.size("context") == 1:  # else, each may have tokens of its own
                    text = f"ranks {_listed(ranks)} of one replica read different ones"
                    cause = "the sampler has to count data-parallel ranks, and not all ranks"
                    yield Finding("samples", text, cause)
                return
            number = min(ranks)
            own = ranks[number] - equal
            both = {owners.setdefault(row, number) for row in own} - {number}
            if both:
                text = f"ranks {min(both)} and {number}, of different replicas, read the same ones"
                cause = "the sampler has to divide them between data-parallel ranks"
                yield Finding("samples", text, cause)
                return
        expected = rows.keys() - equal
        if owners.keys() != expected:
            text = f"{len(expected - owners.keys())} of the {len(expected)} samples of one process "
            text += f"are not read, but {len(owners.keys() - expected)} others"
            yield Finding("samples", text, "their order or number depends on the layout")

    def begin(self) -> Iterator[Finding]:
        """The weights are those of one process, also where several ranks have one of them."""
        a, b = self.right.shapes, self.step.shapes
        if other := [name for name in {**a, **b} if a.get(name) != b.get(name)]:
            lines = [
                f"{name}: {_shape(a, name)} in one process, {_shape(b, name)} here"
                for name in other
            ]
            text = f"{len(other)} have another name or shape than in one process"
            cause = "`sharded_state_dict` has to describe the same whole weights under every layout"
            cause += "; a vocabulary is padded to a multiple of the tensor-parallel ranks"
            yield Finding("weights", text, cause, lines[:MOST])
        begun: dict[Any, tuple[int, int]] = {}
        for rank, name, offset, value in self.step.parts("first"):
            other_rank, before = begun.setdefault((name, offset), (rank, value))
            if before != value:
                text = f"ranks {other_rank} and {rank} have {name}, and begin with different values"
                cause = "draw it from a seed that does not depend on the rank, or broadcast it"
                yield Finding("weights", text, cause, [self.step.lines[name]])
                break

    def has_other_first_weights(self) -> bool:
        """Returns whether the layout has drawn other first weights than one process."""
        if self.step.shapes != self.right.shapes:
            return False
        one = self.right.ranks[0]
        right = put_together(zip(one["pieces"], one["tensors"]["weight"], strict=True))
        parts = zip(self.step.parts("first"), self.step.parts("weight"), strict=True)
        return any(
            checksum([part_of(right[name], offset, part.shape)]) != value
            for (_, name, offset, value), (*_, part) in parts
        )

    def loss(self) -> Iterator[Finding]:
        """The loss is that of one process, and the same on all tensor-parallel ranks."""
        a, b = self.right.loss, self.step.loss
        self.differences["loss"] = _relative(a, b)
        if not self.differences["loss"] <= self.bound:
            factor = b / a if a else math.nan
            text = f"{b:.9g}, and {a:.9g} in one process, a difference of {b - a:.3g}"
            cause = self.meaning(factor) or "the loss function depends on the layout"
            if len(self.step.ranks) == 1:
                cause = "it depends on how samples are divided into micro batches: a mean of "
                cause += "unequal means, or a micro batch that counts twice"
            if name := self.wrong_output():
                cause = f"the forward pass: outputs are wrong from {name} on"
            yield Finding("loss", text, cause)
            return
        found = defaultdict(list)
        for rank in self.step.ranks:
            if rank["losses"]:
                place = rank["place"]["data"][0], rank["place"]["context"][0]
                found[place].append(sum(loss for loss, _ in rank["losses"]))
        for losses in found.values():
            if not max(_relative(losses[0], one) for one in losses) <= self.bound:
                text = f"{' and '.join(f'{one:.9g}' for one in losses)} on tensor-parallel ranks"
                cause = "the loss takes a part of the vocabulary or of the tokens for the whole"
                yield Finding("loss", text, cause)
                return

    def wrong_output(self) -> str:
        """Returns the first module from which on all outputs of rank 0 are wrong; or nothing.

        A rank 0 has the first part of what is sharded. Outputs in between, whose parts are in
        another order, are right if later ones are.
        """
        one, own = self.right.ranks[0], self.step.ranks[0]
        if (
            self.step.size("stage") * self.step.size("context") > 1
            or one["rows"][:1] != own["rows"][:1]
        ):
            return ""
        found = ""
        for name, output in reversed(own["outputs"].items()):
            right = one["outputs"].get(name)
            if right is None or right.dim() != output.dim() or not output.is_floating_point():
                continue
            part = part_of(right, [0] * output.dim(), output.shape)
            if part.shape == output.shape:
                if (part - output).norm() <= 100 * self.bound * part.norm():
                    break
                found = name
        return found

    def meaning(self, factor: float) -> str:
        """Returns of which kind of ranks a factor is the number."""
        found = [
            f"{factor:.4g} is {text} the number of {words} ranks"
            for kind, words in KINDS.items()
            if (size := self.step.size(kind)) > 1
            for value, text in ((size, ""), (1 / size, "1 divided by"))
            if _relative(factor, value) < 1e-3
        ]
        return " and ".join(found).replace("is  the", "is the")

    @cached_property
    def scales(self) -> dict[str, float]:
        """What differences of a gradient are relative to: its norm, or that of a usual one."""
        gradients = self.right.whole("gradient")
        count = sum(one.numel() for one in gradients.values())
        usual = math.sqrt(sum(float(one.square().sum()) for one in gradients.values()) / count)
        return {
            name: max(float(one.norm()), usual * math.sqrt(one.numel()), 1e-300)
            for name, one in gradients.items()
        }

    def gradients(self) -> Iterator[Finding]:
        """Each rank's gradients are its parts of those of one process."""
        right = self.right.whole("gradient")
        found = self.step.copies("gradient", right)
        errors = {
            name: max(_number((one.value - one.right).norm()) / self.scales[name] for one in copies)
            for name, copies in found.items()
        }
        self.differences["gradients"] = max(errors.values())
        names = [*right]
        wrong = [name for name in reversed(names) if not errors[name] <= self.bound]
        if not wrong:
            return
        if self.is_right_when_the_schedule_ends():
            text = "right when the schedule ends, and wrong when the optimizer's step begins"
            cause = "what the program does between the two, for example clipping by a norm"
            yield Finding("gradients", text, cause, [self.line(wrong[0], errors[wrong[0]])])
            return
        patterns = {name: self.pattern(name, found[name]) for name in wrong}
        text, cause = Counter(patterns.values()).most_common(1)[0][0]
        if is_mixed := len({*patterns.values()}) > 1:
            text = "in different ways"
        if is_mixed or not cause:
            where, reason = where_wrong(wrong, names, is_mixed)
            text, cause = text + where, reason or cause
        of = "all" if len(wrong) == len(names) else f"{len(wrong)} of {len(names)}"
        lines = [
            self.line(name, errors[name], patterns[name][0] * is_mixed) for name in wrong[:MOST]
        ]
        rest = [f"... and {len(wrong) - MOST} before them"] * (len(wrong) > MOST)
        yield Finding("gradients", f"{of}: {text}", cause, [*lines, *rest])

    def is_right_when_the_schedule_ends(self) -> bool:
        """Returns whether Megatron's schedule leaves the gradients of one process."""
        if not all("scheduled" in one.ranks[0]["tensors"] for one in (self.right, self.step)):
            return False
        before = self.step.copies("scheduled", self.right.whole("scheduled"))
        pairs = ((name, one) for name, copies in before.items() for one in copies)
        return all(self.close(one.value, one.right, name) for name, one in pairs)

    def line(self, name: str, error: float, text: str = "") -> str:
        """Returns a weight with its difference and the line that makes it."""
        return "  ".join(filter(None, (name, f"{error:.1e}", text, self.step.lines.get(name))))

    def close(self, a: Tensor, b: Tensor, name: str) -> bool:
        """Returns whether two gradients of a weight are equal but for rounding."""
        return bool((a - b).norm() <= 100 * self.bound * self.scales[name])

    def pattern(self, name: str, copies: Sequence[Copy]) -> tuple[str, str]:
        """Returns in words how a weight's gradients are wrong, and what that usually means."""
        close = partial(self.close, name=name)
        for kind, words in KINDS.items():
            some = self.neighbours(copies, kind)
            if len(some) < 2 or all(close(one.value, some[0].value) for one in some):
                continue
            total = torch.stack([one.value for one in some]).sum(dim=0)
            if close(total, some[0].right):
                sequence = kind == "tensor" and self.step.ranks[0]["sequence"]
                text = f"partial on each {words} rank, and nobody sums it"
                return text, CAUSES["sequence" if sequence else kind]
            if close(total / len(some), some[0].right):
                return f"each {words} rank has its own, and nobody averages it", CAUSES["own"]
            return f"different on {words} ranks that all have it", CAUSES["various"]
        factors = sorted({f"{one.factor:.6g}" for one in copies})
        if all(close(one.value, one.factor * one.right) for one in copies):
            cause = self.meaning(copies[0].factor) if len(factors) == 1 else ""
            is_sum = factors == [str(self.step.size("tensor"))]
            if is_sum and "local" in self.step.ranks[0]["tensors"]:
                local = self.step.copies("local", self.right.whole("gradient"))[name]
                some = self.neighbours(local, "tensor")
                if len(some) > 1 and all(close(one.value, some[0].value) for one in some):
                    cause = CAUSES["twice"]
            return f"{' and '.join(factors)} times the right one", cause
        if right := [one.rank for one in copies if close(one.value, one.right)]:
            return f"right on rank {_listed(right)} only", ""
        return "different, and by no simple factor", ""

    def neighbours(self, copies: Sequence[Copy], kind: str) -> list[Copy]:
        """Returns copies of one part, on ranks that differ in one coordinate only."""

        def key(one: Copy) -> Any:
            place = self.step.ranks[one.rank]["place"]
            return [place[word] for word in KINDS if word != kind], one.offset

        return [one for one in copies if key(one) == key(copies[0])]

    def norm(self) -> Iterator[Finding]:
        """All ranks have the norm of one process, and clip by the same factor."""
        norms = [rank["norm"] for rank in self.step.ranks if rank["norm"] is not None]
        expected = self.right.ranks[0]["norm"]
        if norms and expected is not None:
            self.differences["norm"] = max(_relative(expected, one) for one in norms)
            if not self.differences["norm"] <= self.bound:
                shown = sorted({f"{one:.9g}" for one in norms})
                text = f"{' and '.join(shown)}, but {expected:.9g} in one process"
                cause = "each rank takes the norm of its own part"
                if len(shown) == 1:
                    cause = "a weight that several ranks have counts several times, or the part of "
                    cause += "some ranks does not count (`tensor_model_parallel`, `shared`)"
                yield Finding("norm", text, cause, [*self.miscounted()][:MOST])
        factors = [rank["clipped"] for rank in (*self.right.ranks, *self.step.ranks)]
        if not max(_relative(factors[0], one) for one in factors) <= 10 * self.bound:
            others = " and ".join(sorted({f"{one:.5g}" for one in factors[1:]}))
            text = f"gradients are multiplied by {others}, but by {factors[0]:.5g} in one process"
            yield Finding("clipping", text, "all ranks have to clip by the norm of all gradients")

    def miscounted(self) -> Iterator[str]:
        """Yields weights whose attribute says of shards that they are whole, or the reverse."""
        places = defaultdict(set)
        for rank in self.step.ranks:
            for name, _, offset, _, is_shard in rank["pieces"]:
                places[name, is_shard].add((rank["place"]["tensor"][0], offset))
        for (name, is_shard), found in places.items():
            has_shards = len({offset for _, offset in found}) > 1
            if len({rank for rank, _ in found}) > 1 and has_shards != is_shard:
                text = "a shard, but `tensor_model_parallel` is not set"
                if not has_shards:
                    text = "whole on each rank, but `tensor_model_parallel` is set"
                yield f"{name} is {text}  {self.step.lines[name]}"

    def update(self) -> Iterator[Finding]:
        """Each weight changes as in one process, where its gradient is more than rounding."""
        before, after, gradients = (
            self.right.whole(kind) for kind in ("weight", "updated", "gradient")
        )
        errors, self.differences["update"] = {}, 0.0
        for name, copies in self.step.copies("updated", after).items():
            rounding = self.bound * self.scales[name] / math.sqrt(before[name].numel())
            for one in copies:
                old, gradient = (
                    part_of(some[name], one.offset, one.right.shape) for some in (before, gradients)
                )
                counts = gradient.abs() > 1e3 * rounding
                change, error = (
                    (some[counts]).norm() for some in (one.right - old, one.value - one.right)
                )
                if not error <= UPDATE * change + 4 * self.epsilon * old[counts].norm():
                    errors[name] = _number(error / change)
                elif change:
                    value = self.differences["update"], float(error / change)
                    self.differences["update"] = max(value)
        if errors:
            self.differences["update"] = max(errors.values())
            lines = [self.line(name, error) for name, error in errors.items()]
            cause = "the optimizer: learning rate or weight decay of these weights, or gradients "
            cause += "that it does not get"
            yield Finding(
                "update", f"of {len(errors)} of {len(before)} weights", cause, lines[:MOST]
            )


def where_wrong(wrong: Sequence[str], names: Sequence[str], is_mixed: bool) -> tuple[str, str]:
    """Returns in words where the wrong gradients are in the model, and what that usually means.

    Args:
        wrong: Weights with wrong gradients, from the last of the model to the first.
        names: All weights, from the first to the last.
        is_mixed: Whether they are wrong in different ways.
    """
    last = names.index(wrong[0])
    if last + 1 == len(wrong) < len(names):
        cause = f"the backward pass between {names[last]} and {names[last + 1]}: often an "
        cause += "all-reduce that is missing or too much"
        if "router" in wrong[0]:
            cause = "an auxiliary loss of the router that depends on the layout"
        return "; all from here back to the first weight, and none after it", cause
    if len(wrong) == len(names) and is_mixed:
        return "", f"other samples or another loss, or the backward pass after {names[-1]}"
    return "", ""


def _number(value: Any) -> float:
    return math.inf if math.isnan(value) else float(value)


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else _number(abs(a - b) / max(abs(a), abs(b), 1e-300))


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return " x ".join(map(str, shapes[name])) if name in shapes else "absent"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
