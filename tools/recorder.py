"""Runs a program as one rank of `check` or `trace`, and records its first training steps.

A dispatch mode of torch sees each collective, send and receive, also those of the backward pass.
Megatron's schedule calls functions of its module for each part of the step; here they also note
which part begins.
"""

import faulthandler
import functools
import inspect
import json
import os
import re
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from megakit.runtime.accelerator import run_megatron
from megakit.runtime.patching import require_attribute

from . import record
from .dispatch import DispatchMode
from .float64 import in_float64
from .step_values import StepValues, checksum

#: Words for torch's operations, by what their names begin with.
KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "recv": "receive",
    "monitored": "barrier",
}
DONE = "optimizer is done"
#: For each step that is recorded, what collects its values, and whether it is the last one.
Recordings = Iterable[tuple[StepValues | None, bool]]


class Recorder(DispatchMode):
    """Records one training step of this process.

    Attributes:
        found: What is written: coordinates and weights, and at the end the attributes below.
        events: In order of time: the parts of the step, collectives, sends and receives.
        samples: Indices of the samples that the program reads, as far as they are known.
        batches: A checksum of each micro batch.
        losses: Of each micro batch the loss to differentiate, and the tokens that divide it or 0.
        counts: Of each micro batch the tokens, or 0 if the loss function returns no number.

    Args:
        result: File to write.
        recordings: For the values of each step, whose number this is; by default, one without.
    """

    def __init__(self, result: Path, recordings: Recordings = ((None, True),)) -> None:
        super().__init__()
        self.result, self.recordings = result, iter(recordings)
        self.is_last = False
        self.values: StepValues | None = None
        self.is_own = False  # what is communicated now, by this recording
        self.found: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.samples: list[int] = []
        self.batches: list[str] = []
        self.losses: list[tuple[Tensor, Tensor]] = []
        self.counts: list[Tensor] = []
        self.phase = ""
        self.passes = Counter[int]()  # forward passes of each chunk of the model
        #: What stages exchange: its role, and the number of the call; by the tensors' `id`.
        #: Tensors are kept, because another one could get the `id` of a deleted one.
        self.roles: dict[int, tuple[str, int]] = {}
        self.names: dict[int, str] = {}  # of micro batches, by their outputs
        self.received: dict[int, dict[str, Any]] = {}
        self.kept: list[Any] = []

    def install(self) -> None:
        """Wraps functions of Megatron's schedule, of its stages, and of its optimizers."""
        from megatron.core import optimizer
        from megatron.core.pipeline_parallel import p2p_communication, schedules

        def wrap(owner: Any, names: Iterable[str], wrapper: Callable[..., Any]) -> None:
            for name in names:
                original = require_attribute(owner, name)
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
        """Records the first calls for training, and ends the process at the call after them."""
        call = arguments_of(schedule, args, kwargs)
        models = call["model"] if isinstance(call["model"], list) else [call["model"]]
        if call["forward_only"] and not self.is_last:
            return schedule(*args, **kwargs)
        if self.values is not None:
            self.values.look_back(call if self.is_last else {})
        self.write()
        if self.is_last:
            self.begin("after the step")
            distributed.barrier()  # others may still receive what this rank has sent
            sys.stdout.flush()
            os._exit(0)
        self.values, self.is_last = next(self.recordings)
        if self.values is not None:
            self.values.begin(models)
        from megatron.core.utils import get_model_config

        self.found = {"place": coordinates(), "weights": shapes_of(models)}
        batches = call["data_iterator"]
        call["data_iterator"] = (
            [self.read(one) for one in batches] if isinstance(batches, list) else self.read(batches)
        )
        config = get_model_config(models[0])
        self.found["experts"] = getattr(config, "num_moe_experts", None)
        self.found["sequence"] = config.sequence_parallel
        kinds = str(getattr(config, "moe_router_load_balancing_type", ""))
        has_experts = self.found["experts"] is not None
        self.found["balances"] = has_experts and bool(re.search(r"(?<!seq_)aux_loss", kinds))
        finalize = config.finalize_model_grads_func

        def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
            self.begin("gradients")
            self.keep_gradients("local")
            return finalize(*args, **kwargs)

        if finalize is not None:
            config.finalize_model_grads_func = finalize_model_grads
        # A validation may have come before.
        self.events, self.losses, self.counts, self.passes = [], [], [], Counter()
        self.batches = []
        self.__enter__()
        try:
            reports = schedule(**call)
        finally:
            config.finalize_model_grads_func = finalize
        self.keep_gradients("scheduled")
        return reports

    def keep_gradients(self, kind: str) -> None:
        """Lets the values keep gradients, whose communication is not the program's."""
        if self.values is not None:
            self.is_own = True
            self.values.keep_gradients(kind)
            self.is_own = False

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records a forward pass."""
        call = arguments_of(step, args, kwargs)
        chunk = call["vp_stage"]
        self.passes[id(call["model"])] += 1
        name = str(self.passes[id(call["model"])])
        name += "" if chunk is None else f", chunk {chunk + 1}"
        self.begin(f"forward {name}", call["input_tensor"])
        output, tokens = step(*args, **kwargs)
        for tensor in tree_leaves(output):
            self.names[id(tensor)] = name
            self.kept.append(tensor)
        if call["is_last_stage"]:
            per_token = call["config"].calculate_per_token_loss
            loss = tree_leaves(output)[0].detach().clone()
            self.losses.append((loss, tokens if per_token else torch.tensor(0)))
            self.counts.append(tokens)
        return output, tokens

    def backward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records the backward pass of what `forward` has returned."""
        call = arguments_of(step, args, kwargs)
        name = self.names[id(tree_leaves(call["output_tensor"])[0])]
        self.begin(f"backward {name}", call["output_tensor_grad"])
        return step(*args, **kwargs)

    def exchange(self, function: Callable[..., Any], **tensors: Any) -> Any:
        """Records which tensors are outputs of a stage, and which are their gradients."""
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                is_output = name in ("tensor_send_next", "tensor_recv_prev")
                self.roles[id(tensor)] = "output" if is_output else "gradient", len(self.events) + 1
                # And its memory, which the schedule frees at once: gloo may not have sent it yet.
                self.kept += [tensor, tensor.detach()]
        return function(**tensors)

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records the step of the optimizer, of which Megatron may chain several."""
        if self.phase == "optimizer":
            return function(*args, **kwargs)
        self.begin("optimizer")
        self.keep_gradients("gradient")
        result = function(*args, **kwargs)
        if self.values is not None:
            self.values.keep_step(result[1])
        self.phase = DONE
        return result

    def begin(self, phase: str, inputs: Any = None) -> None:
        """Notes that a part of the step begins, whose inputs may have been received before."""
        self.phase = phase
        self.note({"kind": "phase", "phase": phase})
        for tensor in tree_leaves(inputs):
            if id(tensor) in self.received:
                self.received[id(tensor)]["phase"] = phase

    def read(self, batches: Any) -> Iterator[Any] | None:
        """Returns the micro batches; None, as Megatron-LM, for a rank that reads none."""
        return None if batches is None else self._read(batches)

    def _read(self, batches: Any) -> Iterator[Any]:
        """Yields micro batches, and notes what they are."""
        while (batch := next(batches, None)) is not None:  # Megatron-LM's has no __iter__
            parts = batch[0] if isinstance(batch, tuple) and batch else batch  # Lightning's: 3
            if isinstance(parts, Mapping) and isinstance(parts.get("idx"), Tensor):
                self.samples += parts["idx"].tolist()  # as the samples of MNISTDataModule
            self.batches.append(f"{checksum(batch):08x}")
            if self.values is not None:
                self.values.read(batch)
            yield in_float64(batch) if torch.get_default_dtype() == torch.float64 else batch

    def operate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Records a communication, and runs every operation."""
        if func.namespace == "c10d" and not self.is_own:
            self._record(func._opname.replace("_", ""), func._schema.arguments, args)
        return func(*args, **kwargs)

    def _record(self, name: str, parameters: Sequence[Any], args: Sequence[Any]) -> None:
        boxes = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        groups = [ProcessGroup.unbox(box) for box in boxes if "ProcessGroup" in str(box._type())]
        if not groups or groups[0].size() == 1:
            return
        ranks = distributed.get_process_group_ranks(groups[0])
        tensors = [[t for t in tree_leaves(arg) if isinstance(t, Tensor)] for arg in args]
        whole = max(tensors, key=lambda some: sum(tensor.nbytes for tensor in some))
        if self.phase == DONE:
            self.begin("log")
        event: dict[str, Any] = {
            "kind": next((word for start, word in KINDS.items() if name.startswith(start)), name),
            **{"phase": self.phase, "group": in_words(groups[0].group_desc), "ranks": ranks},
            "bytes": sum(tensor.nbytes for tensor in whole),
        }
        numbers = {one.name: arg for one, arg in zip(parameters, args, strict=False)}
        if event["kind"] in ("send", "receive"):
            role, call = self.roles.get(id(whole[0]), ("", 0))
            event |= {"peer": ranks[int(numbers.get("dst", numbers.get("src")) or 0)]}
            event |= {"role": role, "call": call}
            if event["kind"] == "receive":
                self.received[id(whole[0])] = event
        self.note(event)

    def note(self, event: dict[str, Any]) -> None:
        """Adds an event, also to a file of its own: if the rank hangs, it is the last one."""
        self.events.append(event)
        self.result.with_suffix(".last").write_text(json.dumps(event))

    def write(self) -> None:
        """Writes what was recorded; nothing, if the program made no step."""
        if not self.found:
            return
        self.__exit__(None, None, None)
        losses = [(float(loss), int(tokens)) for loss, tokens in self.losses]
        tokens = sum(count for _, count in losses)
        self.found |= {
            "events": self.events,
            "samples": [*dict.fromkeys(self.samples)],
            "batches": [*dict.fromkeys(self.batches)],  # each chunk of a model reads them
            "loss": sum(loss for loss, _ in losses) / (tokens or 1) if losses else None,
            "tokens": tokens,
        }
        self.result.write_text(json.dumps(self.found))
        if self.values is not None:
            counts = [int(count) for count in self.counts]
            self.values.end(**self.found, losses=losses, counts=counts)
        self.found = {}


def arguments_of(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a call by name, with those that have their default."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def in_words(description: str) -> str:
    """Returns Megatron's name of a group in words, such as `tensor` or `data+context`."""
    from megatron.core import parallel_state

    if not description.endswith(("GROUP", "WITH_CP")):
        return "all"  # torch's first group
    words = description.lower()
    if parallel_state.get_context_parallel_world_size() > 1:
        words = words.replace("_with_cp", "_context")
    kinds = "position|embedding|expert|tensor|pipeline|data|context|optimizer"
    return "+".join(re.findall(kinds, words)) or "model"


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
        prefix = f"chunk {number + 1}: " * (len(models) > 1)
        for name, weight in model.named_parameters():
            whole = [*weight.shape]
            if getattr(weight, "tensor_model_parallel", False) and hasattr(weight, "partition_dim"):
                whole[weight.partition_dim] *= coordinates()["tensor"][1]
            found.append((prefix + name.replace("module.", ""), [*weight.shape], whole))
    return found


def watch_samples(samples: list[int]) -> None:
    """Adds to a list which samples the ladder's programs read, where these are."""
    try:
        from ladder.gpt.text_samples import TextSamples
        from mnist.samples import TrainingSamples
    except ImportError:
        return

    for kind in (TextSamples, TrainingSamples):

        def read(self: Any, some: slice, original: Any = kind.__getitem__) -> Any:
            samples.extend(range(some.start, some.stop))
            return original(self, some)

        kind.__getitem__ = read  # type: ignore[method-assign]


def prepare(program: Path) -> None:
    """Patches Megatron for this machine, and imports it: the source beside the program, if any."""
    sys.path.insert(0, str(program.resolve().parent))
    run_megatron("gpu" if torch.cuda.is_available() else "cpu")
    from megatron.core import optimizer, pipeline_parallel  # noqa: F401


def run(
    program: Path, arguments: Sequence[str], result: Path, recordings: Recordings = ((None, True),)
) -> None:
    """Runs the program until it begins the step after the recorded ones, or ends."""
    prepare(program)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    pairs = [*recordings]
    record.recordings += [(values, last) for values, last in pairs if values is not None]
    recorder = Recorder(result, pairs)
    recorder.install()
    watch_samples(recorder.samples)
    sys.argv = [str(program), *arguments]
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        recorder.write()
