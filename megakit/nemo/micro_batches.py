"""Runs the micro batches of a step by Megatron's schedule: training, validation or prediction."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_tensor_shapes
from nemo.lightning import megatron_parallel
from nemo.lightning.megatron_parallel import MegatronLossReduction

from megakit.data.device import copied
from megakit.errors import UserError
from megakit.nemo.refusals import check_mask
from megakit.runtime.patching import require_attribute
from megakit.training.short_schedule import shortened

#: NeMo's private class that finds the methods of a Lightning module for each kind of step.
_ModuleStepFunction = require_attribute(megatron_parallel, "_ModuleStepFunction")


@dataclass
class Step:
    """Holds what all steps of one kind have in common.

    Attributes:
        schedule: Megatron's schedule; needs the data and the number of micro batches.
        make_loss: Makes the loss of a step.
        loss: The loss of the last step.
        is_first: Whether no step of this kind is complete yet.
    """

    schedule: Callable[..., Any]
    make_loss: Callable[[], MegatronLossReduction]
    loss: MegatronLossReduction
    is_first: bool = True

    def run(self, data: Iterator[Any], num_micro_batches: int) -> Any:
        """Runs the schedule; returns the reduced reports, or None before the last stage."""
        self.loss = self.make_loss()
        reports = self.schedule(data_iterator=data, num_microbatches=num_micro_batches)
        self.is_first = False
        return self.loss.reduce(reports) if reports else None


def make_step(kind: str, strategy: Any) -> Step:
    """Prepares all steps of a kind; NeMo's `MegatronParallel` does this at every step.

    Args:
        kind: `training`, `validation`, `test` or `predict`.
        strategy: The strategy, with the model of this rank.
    """
    chunk, module, plugin = strategy.model[0], strategy.model.module, strategy.precision_plugin
    sampler, device = strategy.data_sampler, strategy.root_device
    data_step = _ModuleStepFunction.from_data_step(module, kind)
    if data_step is None and parallel_state.get_context_parallel_world_size() > 1:
        raise UserError(
            "context_parallel_size: each rank needs its part of the sequence. Give the Lightning "
            "module a method data_step that divides it."
        )
    read = data_step(chunk) if data_step else functools.partial(next_batch, device=device)
    # The last pipeline stage calls `training_step`, and other stages call `forward_step`.
    compute = _ModuleStepFunction.from_forward_step(module, kind)(chunk)
    make_loss = functools.partial(_ModuleStepFunction.from_loss_reduction(module, kind), module)
    is_first = parallel_state.is_pipeline_first_stage()
    is_last = parallel_state.is_pipeline_last_stage()
    observers = strategy.observers if kind == "validation" and is_last else ()
    shape = None if is_first and is_last else _stage_shape(chunk, sampler)
    has_mask = is_last and kind in ("validation", "test")

    def forward(data: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
        batch = read(data)
        if is_first:
            batch = plugin.convert_input(batch)
        seen, loss = batch, step.loss.forward
        if has_mask and step.is_first:
            seen, loss = check_mask(batch, step.loss)
        output = compute(model, seen)
        if is_last:
            output = plugin.convert_output(output)
        elif shape is not None:
            check_shape(output, shape)
        for observe in observers:
            observe(batch, output)
        step.loss.setup(seen)
        return output, functools.partial(loss, seen)

    schedule = get_forward_backward_func()
    schedule = functools.partial(
        shortened(schedule, chunk) if kind == "training" else schedule,
        forward_step_func=forward,
        model=chunk,
        seq_length=sampler.seq_len,
        micro_batch_size=sampler.micro_batch_size,
        forward_only=kind != "training",
        adjust_tensor_shapes_fn=shape and (lambda *of_neighbours: ([shape], [shape])),
    )
    step = Step(schedule, make_loss, make_loss())
    return step


def next_batch(dataloader_iter: Iterator[Any], device: torch.device) -> Any:
    """Returns the next batch on the device, like NeMo's default, but without waiting for it."""
    batch = next(dataloader_iter)
    if isinstance(batch, tuple) and len(batch) == 3:  # with Lightning's two indices
        batch = batch[0]
    return copied(batch, device)


def _stage_shape(model: Any, sampler: Any) -> tuple[int, ...] | None:
    """Returns the shape of what pipeline stages send, (sequence, micro batch, width).

    None: Megatron's stages send the shape of each tensor, because the config asks for it.
    """
    config = require_attribute(model, "config")
    if config.variable_seq_lengths:
        return None
    if own := getattr(config, "stage_shape", None):
        length, width = own
        return length, sampler.micro_batch_size, width
    shapes = get_tensor_shapes(
        seq_length=sampler.seq_len,
        micro_batch_size=sampler.micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
    )
    return tuple(shapes[0])


def check_shape(output: Any, shape: tuple[int, ...]) -> None:
    """Checks what a pipeline stage sends; the next stage would wait for the rest without end.

    Raises:
        UserError: The model's output has another shape than the config says.
    """
    found = tuple(getattr(output, "shape", ())) or type(output).__name__
    if found != shape:
        raise UserError(
            f"A pipeline stage returned {found}, and the next stage expects a tensor {shape}: "
            "(sequence length, micro batch, width). If the model does not split into pipeline "
            "stages, use --pipeline-parallel 1; otherwise set `stage_shape` in the model's config "
            "to (sequence length, width)."
        )
