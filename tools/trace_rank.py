"""Runs a program as one rank of `./run trace`, and records its first training step.

A dispatch mode of torch sees each collective, send and receive, also those of the backward pass.
Megatron's schedule calls functions of its module for each part of the step; here they also note
which part begins.
"""

import functools
import inspect
import json
import os
import re
import runpy
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from megakit.runtime import use_megatron

#: torch's class has no types.
_TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
#: Words for torch's operations, by the letters of their names up to these endings.
KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "recv": "receive",
    "monitoredbarrier": "barrier",
}
ENDINGS = ("anysource", "coalesced", "intotensor", "base")


class Recorder(_TorchDispatchMode):
    """Records what this rank communicates, and when.

    Attributes:
        events: In order of time: the parts of the step, collectives, sends and receives.
        samples: Indices of the samples that the ladder's programs read.
        batches: A checksum of each micro batch.
        losses: Of each micro batch the loss to differentiate, and the tokens that divide it or 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.samples: list[int] = []
        self.batches: list[str] = []
        self.losses: list[tuple[Tensor, Tensor]] = []
        self.phase = ""
        #: What stages exchange, with the number of their call, and the micro batch of a tensor.
        #: Tensors are kept, because another one could get the `id` of a deleted one.
        self.roles: dict[int, tuple[str, int]] = {}
        self.phases: dict[int, str] = {}
        self.kept: list[Any] = []

    def begin(self, phase: str) -> None:
        """Notes that a part of the step begins."""
        self.phase = phase
        self.events.append({"at": time.monotonic(), "kind": "phase", "phase": phase})

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Records a communication, and runs every operation."""
        if func.namespace == "c10d":
            self._record(func._opname, func._schema.arguments, args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, parameters: Sequence[Any], args: Sequence[Any]) -> None:
        boxes = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        groups = [ProcessGroup.unbox(box) for box in boxes if "ProcessGroup" in str(box._type())]
        if not groups or groups[0].size() == 1:
            return
        ranks = distributed.get_process_group_ranks(groups[0])
        tensors = [[t for t in tree_leaves(arg) if isinstance(t, Tensor)] for arg in args]
        whole = max(tensors, key=lambda some: sum(tensor.nbytes for tensor in some))
        short = name.replace("_", "")
        for ending in ENDINGS:
            short = short.removesuffix(ending)
        if self.phase == "optimizer done":
            self.begin("log")
        event: dict[str, Any] = {
            **{"at": time.monotonic(), "kind": KINDS.get(short, short), "phase": self.phase},
            **{"group": in_words(groups[0].group_desc), "ranks": ranks},
            "values": sum(tensor.numel() for tensor in whole),
            "bytes": sum(tensor.nbytes for tensor in whole),
        }
        numbers = {one.name: arg for one, arg in zip(parameters, args, strict=False)}
        peer = numbers.get("dst", numbers.get("src")) if short in ("send", "recv") else None
        if peer is not None:
            role, call = self.roles.get(id(whole[0]), ("", 0))
            event |= {"peer": ranks[peer], "role": role, "call": call}
            event["phase"] = self.phases.get(id(whole[0]), self.phase)
            self.kept.append((whole[0], event))
        self.events.append(event)

    def belongs(self, tensors: Any, phase: str) -> None:
        """Notes in which part of the step tensors are sent, or used after they were received."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self.phases[id(tensor)] = phase
                for kept, event in self.kept:
                    if kept is tensor:
                        event["phase"] = phase
                self.kept.append((tensor, {}))

    def read(self, batches: Any) -> Any:
        """Returns the iterators of a schedule's call, which also note a checksum of each batch."""
        if isinstance(batches, list):
            return [self.read(one) for one in batches]
        return batches if batches is None else _Watched(batches, self._note_batch)

    def _note_batch(self, batch: Any) -> None:
        if isinstance(batch, tuple) and batch and isinstance(batch[0], Mapping):
            batch = batch[0]  # Lightning adds indices
        if isinstance(batch, Mapping) and isinstance(batch.get("idx"), Tensor):
            self.samples += batch["idx"].tolist()  # as the samples of MNISTDataModule
        found = 0
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                values = leaf.detach().cpu().contiguous().flatten().view(torch.uint8)
                found = zlib.crc32(values.numpy().tobytes(), found)
        if (word := f"{found:08x}") not in self.batches:  # each chunk of a model reads them
            self.batches.append(word)


class _Watched:
    """An iterator that calls a function for each item."""

    def __init__(self, items: Iterator[Any], note: Callable[[Any], None]) -> None:
        self.items, self.note = items, note

    def __iter__(self) -> "_Watched":
        return self

    def __next__(self) -> Any:
        item = next(self.items)
        self.note(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self.items, name)


def in_words(description: str) -> str:
    """Returns Megatron's name of a group in words, such as `tensor` or `data+context`."""
    from megatron.core import parallel_state

    if not description.endswith(("GROUP", "WITH_CP")):
        return "all"  # torch's first group
    words = description.lower()
    if parallel_state.get_context_parallel_world_size() > 1:
        words = words.replace("_with_cp", "_context")
    kinds = re.findall(
        "position|embedding|expert|tensor|pipeline|data|context|model|optimizer", words
    )
    return "+".join(kinds if kinds in (["model"], ["data"]) else [k for k in kinds if k != "model"])


class Trace:
    """Watches Megatron's schedule in this process, and writes what one step did."""

    def __init__(self, result: Path) -> None:
        self.result, self.recorder = result, Recorder()
        self.found: dict[str, Any] = {}
        self.calls = 0

    def install(self) -> None:
        """Wraps functions of Megatron's schedule, of its stages, and of its optimizers."""
        from megatron.core import optimizer
        from megatron.core.pipeline_parallel import p2p_communication, schedules

        def wrap(owner: Any, names: Iterable[str], wrapper: Callable[..., Any]) -> None:
            for name in names:
                original = getattr(owner, name)
                new = functools.partial(wrapper, original)
                setattr(owner, name, functools.wraps(original)(lambda *a, f=new, **k: f(*a, **k)))

        wrap(schedules, (n for n in vars(schedules) if n.startswith("forward_backward_")), self.run)
        wrap(schedules, ["forward_step"], self.forward)
        wrap(schedules, ["backward_step"], self.backward)
        wrap(p2p_communication, ["_p2p_ops", "_batched_p2p_ops"], self.exchange)
        kinds = [optimizer.MegatronOptimizer]
        for kind in kinds:
            kinds += kind.__subclasses__()
            if "step" in vars(kind):
                wrap(kind, ["step"], self.step)

    def run(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records the first call for training, and ends the process at the next call."""
        if self.found:
            self.write()
            distributed.barrier()  # others may still receive what this rank has sent
            sys.stdout.flush()
            os._exit(0)
        call = inspect.signature(schedule).bind(*args, **kwargs).arguments
        if call["forward_only"]:
            return schedule(*args, **kwargs)
        models = call["model"] if isinstance(call["model"], list) else [call["model"]]
        self.found = {"place": coordinates(), "weights": shapes_of(models)}
        self.chunks, self.counts = len(models), Counter[int]()
        call["data_iterator"] = self.recorder.read(call["data_iterator"])
        from megatron.core.utils import get_model_config

        config = get_model_config(models[0])
        finalize = config.finalize_model_grads_func
        self.recorder.__enter__()

        def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
            self.recorder.begin("gradients")
            return finalize(*args, **kwargs)

        if finalize is not None:
            config.finalize_model_grads_func = finalize_model_grads
        try:
            return schedule(**call)
        finally:
            config.finalize_model_grads_func = finalize

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records a forward pass."""
        if not self.is_recording:
            return step(*args, **kwargs)
        bound = inspect.signature(step).bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        model, chunk = call["model"], call["vp_stage"] or 0
        self.counts[id(model)] += 1
        name = str(self.counts[id(model)]) + f", chunk {chunk + 1}" * (self.chunks > 1)
        self.recorder.belongs(call["input_tensor"], f"forward {name}")
        self.recorder.begin(f"forward {name}")
        output, tokens = step(*args, **kwargs)
        self.recorder.belongs(output, f"forward {name}")
        if call["is_last_stage"]:
            per_token = call["config"].calculate_per_token_loss
            loss = tree_leaves(output)[0].detach().clone()
            self.recorder.losses.append((loss, tokens if per_token else torch.tensor(0)))
        return output, tokens

    def backward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records the backward pass of what `forward` has returned."""
        if not self.is_recording:
            return step(*args, **kwargs)
        call = inspect.signature(step).bind(*args, **kwargs).arguments
        output = tree_leaves(call["output_tensor"])[0]
        name = self.recorder.phases[id(output)].replace("forward", "backward")
        self.recorder.belongs(call["output_tensor_grad"], name)
        self.recorder.begin(name)
        gradient = step(*args, **kwargs)
        self.recorder.belongs(gradient, name)
        return gradient

    def exchange(self, function: Callable[..., Any], **tensors: Any) -> Any:
        """Records which tensors are outputs of a stage, and which are their gradients."""
        self.calls += 1
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                is_output = name in ("tensor_send_next", "tensor_recv_prev")
                role = "output" if is_output else "gradient"
                self.recorder.roles[id(tensor)] = role, self.calls
                self.recorder.kept.append((tensor, {}))
        return function(**tensors)

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records the step of the optimizer, of which Megatron may chain several."""
        if not self.is_recording or self.recorder.phase == "optimizer":
            return function(*args, **kwargs)
        self.recorder.begin("optimizer")
        result = function(*args, **kwargs)
        self.recorder.phase = "optimizer done"
        return result

    @property
    def is_recording(self) -> bool:
        """Whether the step is running."""
        return bool(self.found)

    def write(self) -> None:
        """Writes what was recorded; nothing, if the program made no step."""
        recorder = self.recorder
        if not self.found or self.result.exists():
            return
        recorder.__exit__(None, None, None)
        losses = [(float(loss), int(tokens)) for loss, tokens in recorder.losses]
        tokens = sum(count for _, count in losses)
        self.found |= {
            "events": recorder.events,
            "samples": [*dict.fromkeys(recorder.samples)],
            "batches": recorder.batches,
            "loss": sum(loss for loss, _ in losses) / (tokens or 1) if losses else None,
            "tokens": tokens,
        }
        self.result.write_text(json.dumps(self.found))


def coordinates() -> dict[str, list[int]]:
    """Returns this rank's coordinates with the sizes, by the kind of parallelism."""
    from megatron.core import parallel_state as state

    names = {"tensor": "tensor_model", "context": "context", "data": "data"}
    names |= {"expert": "expert_model", "stage": "pipeline_model"}
    return {
        word: [getattr(state, f"get_{name}_parallel_{part}")() for part in ("rank", "world_size")]
        for word, name in names.items()
    }


def shapes_of(models: Sequence[Any]) -> list[tuple[str, list[int], list[int]]]:
    """Returns name, shape, and shape of the whole of each weight that this rank has."""
    found = []
    for number, model in enumerate(models):
        for name, weight in model.named_parameters():
            name = name.replace("module.", "")
            whole = [*weight.shape]
            if getattr(weight, "tensor_model_parallel", False):
                whole[weight.partition_dim] *= coordinates()["tensor"][1]
            prefix = f"chunk {number + 1}: " * (len(models) > 1)
            found.append((prefix + name, [*weight.shape], whole))
    return found


def watch_samples(recorder: Recorder) -> None:
    """Records which samples the ladder's programs read."""
    from ladder.gpt.text_samples import TextSamples
    from mnist.samples import TrainingSamples

    for kind in (TextSamples, TrainingSamples):

        def read(self: Any, some: slice, original: Any = kind.__getitem__) -> Any:
            recorder.samples += range(some.start, some.stop)
            return original(self, some)

        kind.__getitem__ = read  # type: ignore[method-assign]


def prepare() -> None:
    """Patches Megatron for this machine, and imports it."""
    use_megatron("gpu" if torch.cuda.is_available() else "cpu")
    from megatron.core import optimizer
    from megatron.core.pipeline_parallel import schedules

    assert optimizer, schedules


def run(result: Path, program: Path, arguments: Sequence[str]) -> None:
    """Runs the program until it begins its second step, or ends."""
    prepare()
    trace = Trace(result)
    trace.install()
    watch_samples(trace.recorder)
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.resolve().parent))
    runpy.run_path(str(program), run_name="__main__")
    trace.write()
