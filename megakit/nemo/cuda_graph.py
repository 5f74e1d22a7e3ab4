"""Repeats a training step on a GPU as one CUDA graph.

Python launches some sixty kernels in a step of a small model, one after another, which takes many
times longer than the kernels. A CUDA graph launches them with one call. The first steps run as
always. Then a step is captured: Python runs it once more, and CUDA notes its kernels instead of
running them. Each later step repeats these kernels on the same memory, so the results are the same
bits, and no Python code of the model, the loss or the optimizer runs. A number that Python changes
from step to step, such as a loss weight, keeps the value of the captured step, without an error.
"""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from megatron.core import parallel_state
from torch import Tensor

from megakit.data.device import gpu_lock
from megakit.errors import UserError
from megakit.nemo.micro_batches import next_batch
from megakit.runtime.fused_adam import FusedAdam
from megakit.runtime.patching import require_attribute

#: Steps before the capture, in which NCCL, cuBLAS and Megatron allocate what they keep.
WARM_UP_STEPS = 3
#: torch's functions of many tensors, and of nested containers.
_copy = require_attribute(torch, "_foreach_copy_")
_flatten = require_attribute("torch.utils._pytree", "tree_flatten")
_unflatten = require_attribute("torch.utils._pytree", "tree_unflatten")
#: Megatron's function for the states of all generators: CPU, GPU, and its tracker's by name.
_states = require_attribute("megatron.core.tensor_parallel.random", "_get_all_rng_states")

#: Makes a step by Python, from its micro batches; returns the values of the training step by name.
Compute = Callable[[Iterator[Any]], dict[str, Tensor]]


class StepGraph:
    """Makes the training steps of a strategy: the first ones by Python, the others by the graph.

    What changes from step to step is in tensors that the graph reads: the batches, and the learning
    rate and the number of steps of `FusedAdam`.

    Raises:
        UserError: A graph cannot repeat what the strategy or the model does.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._adams = list(_adams(strategy))
        if reasons := list(_obstacles(strategy, self._adams)):
            raise refused(", and ".join(reasons))
        self._weights = list(strategy.model.parameters())
        self._num_eager_steps = 0
        self._graph: Any = None

    def __call__(self, data: Iterator[Any], compute: Compute) -> dict[str, Tensor]:
        """Makes a step; returns the values of the training step by name."""
        strategy = self._strategy
        count, device = strategy.data_sampler.num_microbatches, strategy.root_device
        # With two numbers, as Lightning gives them to whoever reads the data.
        batches = [(next_batch(data, device), number, 0) for number in range(count)]
        for adam in self._adams:
            adam.counts = False
            adam.count()
        if self._num_eager_steps < WARM_UP_STEPS:
            self._num_eager_steps += 1
            logged, states = len(self._logged()), _random_states()
            outputs = compute(iter(batches))
            if _random_states() != states:
                raise refused("each step has random numbers of its own, as for dropout")
            if len(self._logged()) > logged:
                raise refused("training_step logs values, which the loss's report can return")
            return outputs
        tensors, form = _flatten([batch for batch, *_ in batches])
        if self._graph is None:
            self._capture(tensors, form, compute)
        now = self._fixed(tensors, form)
        if changed := [name for name, value in now.items() if value != self._captured[name]]:
            raise refused(f"{' and '.join(changed)} changed since the step was captured")
        _copy(self._inputs, tensors)
        self._graph.replay()
        values = self._values.clone().unbind()  # the next step overwrites them
        strategy.norms += values[len(self._names) :]
        return dict(zip(self._names, values, strict=False))

    def _capture(self, tensors: list[Tensor], form: Any, compute: Compute) -> None:
        """Captures a step that reads its batches from `_inputs` and writes `_values`."""
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise refused("a batch has a value that is no tensor")
        self._inputs = [tensor.clone() for tensor in tensors]
        batches = [
            (batch, number, 0) for number, batch in enumerate(_unflatten(self._inputs, form))
        ]
        self._captured = self._fixed(tensors, form)
        self._states = [adam.state for adam in self._adams]  # no other has their identity
        norms_before = self._strategy.take_norms()
        graph = torch.cuda.CUDAGraph()
        # Megatron has prepared the gradients on the current stream, see `use_stream`.
        stream = torch.cuda.current_stream()
        try:
            with (
                gpu_lock,
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                outputs = compute(iter(batches))
                norms = self._strategy.take_norms()
                together = [*outputs.values(), *norms]
                self._values = torch.stack([one.detach().double().reshape(()) for one in together])
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a capture that failed fails, too
            if isinstance(cause, torch.OutOfMemoryError):
                raise
            told = str(cause).partition("\n")[0]
            raise refused(f"it may read a value from the GPU ({told})") from error
        self._strategy.norms = norms_before
        self._names, self._graph = [*outputs], graph

    def _fixed(self, tensors: list[Tensor], form: Any) -> dict[str, Any]:
        """Returns what the graph cannot follow if it changes."""
        options = ("betas", "eps", "weight_decay")
        groups = [group for adam in self._adams for group in adam.param_groups]
        return {
            "the form of the batches": (form, [(one.shape, one.dtype) for one in tensors]),
            "the optimizer's options": [[group[name] for name in options] for group in groups],
            "the optimizer's state": [id(adam.state) for adam in self._adams],
            "the choice of trained weights": [weight.requires_grad for weight in self._weights],
        }

    def _logged(self) -> Any:
        """Returns what `log` was called with."""
        return self._strategy.trainer.fit_loop.epoch_loop._results


def _random_states() -> list[bytes]:
    """Returns the states of this rank's random generators, which change when a step draws."""
    cpu, gpu, tracked = _states()
    return [state.numpy().tobytes() for state in (cpu, gpu, *tracked.values())]


def use_stream(device: torch.device) -> None:
    """Gives this thread a stream of its own: CUDA captures no graph on the default stream.

    Autograd runs a weight's hooks on the stream that was current when Megatron prepared the weight.
    So this is called before the model is built, and the stream remains for the whole run.
    """
    make: Any = torch.cuda.Stream
    stream = make(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)


def refused(reason: str) -> UserError:
    """Returns the error for a step that a graph cannot repeat."""
    return UserError(
        f"cuda_graph=True: a CUDA graph cannot repeat this training step, because {reason}. Leave "
        "cuda_graph out."
    )


def _adams(strategy: Any) -> Iterator[FusedAdam]:
    """Yields the optimizers of this rank's weights, if all of them are `FusedAdam`."""
    owner = require_attribute(strategy.optimizers[0], "mcore_optimizer")
    owners = getattr(owner, "chained_optimizers", [owner])
    found = [getattr(one, "optimizer", None) for one in owners]
    adams = [one for one in found if isinstance(one, FusedAdam)]
    yield from adams if len(adams) == len(found) else ()


def _obstacles(strategy: Any, adams: list[FusedAdam]) -> Iterator[str]:
    trainer, module, ddp = strategy.trainer, strategy.lightning_module, strategy.ddp_config
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        yield "pipeline stages wait for each other"
    if any(getattr(ddp, f"overlap_{what}", False) for what in ("grad_reduce", "param_gather")):
        yield "gradients or weights are sent while the model computes"
    if getattr(require_attribute(strategy.model[0], "config"), "calculate_per_token_loss", False):
        yield "Megatron reads the number of tokens from the GPU"
    if not adams:
        yield "the optimizer is not FusedAdam"
    hooks = trainer.fit_loop.epoch_loop.hooks("on_before_optimizer_step")
    if hooks or is_overridden("optimizer_step", module, pl.LightningModule):
        yield "a hook sees the gradients"
    if trainer.precision in ("16-mixed", "16-true"):
        yield "float16 reads from the GPU whether the gradients are finite"
