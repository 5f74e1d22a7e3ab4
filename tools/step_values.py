"""What a rank computes in a training step, as it is compared with other ranks and layouts."""

import contextlib
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .causality import find_leak, is_causal, is_tokens, outputs_of
from .pieces import (
    Piece,
    copy_into,
    gathered_gradients,
    gradient_of,
    pieces_of,
    put_together,
)

#: The line of each weight that made it: outside of libraries if it can.
made: dict[nn.Parameter, str] = {}


class StepValues:
    """Collects the values of one training step of this process, and writes them to a file.

    Args:
        file: For the values.
        first: Such a file of one process, whose weights this process takes; None for that process.
        causal: Whether the model is causal also if no module says so.
    """

    def __init__(self, file: Path, first: Path | None, causal: bool = False) -> None:
        self.file, self.first, self.causal = file, first, causal
        self.models: Sequence[Any] = ()
        self.pieces: list[Piece] = []
        #: By kind of value, one tensor for each piece.
        self.tensors: dict[str, list[Tensor]] = {}
        self.found: dict[str, Any] = {
            **{"norm": None, "clipped": 1.0, "stepped": False, "rows": [], "terms": 0},
            **{"leak": None, "left": [], "outputs": {}, "tokens": False},
        }
        self.unclipped: dict[nn.Parameter, Tensor] = {}
        self.reached: set[nn.Parameter] = set()  # by a backward pass
        self.nodes: list[Any] = []
        self.watching = contextlib.ExitStack()

    def begin(self, models: Sequence[Any]) -> None:
        """Notes the first weights, and replaces them by those of one process."""
        self.models, self.pieces = models, pieces_of(models)
        self.found["first"] = [checksum([one.of(one.parameter)]) for one in self.pieces]
        if self.first is not None:
            one = torch.load(self.first)
            weights = zip(one["pieces"], one["tensors"]["weight"], strict=True)
            copy_into(self.pieces, put_together(weights))
        self.keep("weight", {one.parameter: one.parameter for one in self.pieces})
        hook = register_optimizer_step_pre_hook(lambda *_: self.keep_gradients("gradient"))
        self.watching.callback(hook.remove)
        for model in models:
            self.watching.enter_context(outputs_of(model, self.found["outputs"]))
        for parameter in {one.parameter for one in self.pieces}:
            node: Any = parameter.view_as(parameter).grad_fn
            self.nodes.append(node.next_functions[0][0])
            self.nodes[-1].register_hook(lambda *_, one=parameter: self.reached.add(one))

    def read(self, batch: Any) -> None:
        """Notes the samples of a micro batch: a checksum of each one's rows in all tensors."""
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        size = max((len(leaf) for leaf in leaves), default=0)
        whole = [leaf for leaf in leaves if len(leaf) == size]
        self.found["rows"].append([checksum([leaf[row] for leaf in whole]) for row in range(size)])
        self.found["tokens"] = any(map(is_tokens, leaves))
        self.found["terms"] += sum(leaf.numel() for leaf in leaves[:1])

    def keep(self, kind: str, values: Mapping[Any, Tensor]) -> None:
        """Copies of each piece its part of a tensor, or nothing where no backward pass came."""
        self.tensors[kind] = [
            piece.of(values[piece.parameter]).cpu().clone()
            if piece.parameter in values
            else torch.zeros(piece.sizes)
            for piece in self.pieces
        ]

    def keep_gradients(self, kind: str) -> None:
        """Notes gradients, once.

        Args:
            kind: `local`, of this rank's own micro batches; `scheduled`, what the schedule leaves;
                `gradient`, what the optimizer gets.
        """
        if kind in self.tensors:
            return
        found = {one.parameter: gradient_of(one.parameter) for one in self.pieces}
        own = {parameter: one for parameter, one in found.items() if one is not None}
        if kind == "scheduled" or not self.unclipped:
            self.unclipped = {parameter: one.clone() for parameter, one in own.items()}
        self.keep(kind, own if kind == "local" else gathered_gradients(self.models))

    def keep_step(self, norm: Any) -> None:
        """Notes the norm that Megatron's optimizer returns, and the factor of its clipping."""
        self.found |= {"norm": None if norm is None else float(norm), "stepped": True}
        for parameter, before in self.unclipped.items():
            after = gradient_of(parameter)
            if after is not None and bool((changed := (after != before) & (before != 0)).any()):
                self.found["clipped"] = float((after[changed] / before[changed]).median())
                break

    def look_back(self, call: dict[str, Any]) -> None:
        """Notes what the next step must not find; in one process also what is not causal.

        Args:
            call: The schedule's arguments of the next step, whose samples are used; empty if not.
        """
        self.found["left"] = sorted(left_over(self.models))
        batches, model = call.get("data_iterator"), self.models[0]
        if self.first is None and batches is not None and (self.causal or is_causal(model)):
            self.found["leak"] = find_leak(call["forward_step_func"], batches, model)

    def end(self, **found: Any) -> None:
        """Notes the weights after the step, and writes the file."""
        self.watching.close()
        self.keep_gradients("gradient")
        self.found["reached"] = [one.parameter in self.reached for one in self.pieces]
        self.keep("updated", {one.parameter: one.parameter for one in self.pieces})
        pieces = [
            (one.name, one.shape, one.offset, origin(one), is_shard(one)) for one in self.pieces
        ]
        torch.save(self.found | found | {"pieces": pieces, "tensors": self.tensors}, self.file)


def is_shard(piece: Piece) -> bool:
    """Returns whether Megatron takes a weight for a shard, which each rank adds to the norm."""
    return bool(getattr(piece.parameter, "tensor_model_parallel", False))


def origin(piece: Piece) -> str:
    """Returns the line that makes a weight, and the model's name of it if it is another one."""
    line = made.get(piece.parameter, "")
    is_same = piece.name.endswith(piece.local.rpartition(".layers.")[2].partition(".")[2])
    return line if is_same else f"{line}, {piece.local}"


def left_over(models: Sequence[Any]) -> Iterator[str]:
    """Yields what a step must not find: gradients of the step before."""
    for model in models:
        for name, weight in model.named_parameters():
            buffer = getattr(weight, "main_grad", None)
            if buffer is None or not weight.requires_grad:
                continue
            name = name.replace("module.", "")
            if weight.grad is not None and weight.grad.data_ptr() == buffer.data_ptr():
                yield f"{name}: `grad` is still the buffer `main_grad` (no optimizer.zero_grad())"
            elif bool(buffer.any()):
                yield f"{name}: `main_grad` is not zero (no zero_grad_buffer())"


def checksum(value: Any) -> int:
    """Returns a checksum of all tensors in a value."""
    found = 0
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            values = leaf.detach().cpu().contiguous().flatten().view(torch.uint8)
            found = zlib.crc32(values.numpy().tobytes(), found)
    return found


def watch_weights() -> None:
    """Notes for each weight the line that makes it."""
    register = nn.Module.register_parameter

    def noted(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None and parameter not in made:
            made[parameter] = _line(sys._getframe(1))

    function: Callable[..., Any] = noted
    nn.Module.register_parameter = function  # type: ignore[method-assign]


def _line(frame: Any) -> str:
    """Returns the innermost line outside of libraries, and the line that called its function."""
    lines: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and "<" not in path:
            lines.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    libraries = ("/site-packages/", "/lib/python", "/megatron/core/", f"{Path(__file__).parent}/")
    own = [line for line in lines if not any(name in line for name in libraries)] or lines[:1]
    return " from ".join([*own[:1], *(line.rpartition(":")[2] for line in own[1:2])])
