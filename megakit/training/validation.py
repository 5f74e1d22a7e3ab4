"""Averages the validation loss over the steps of a validation, and computes its metrics.

`ExactStrategy.validation_step` passes the loss of a step, which `losses.py` computes.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from torch import Tensor
from torchmetrics import Metric

from megakit.errors import UserError
from megakit.runtime.patching import require_attribute

T = TypeVar("T")
#: A micro batch. The type of a model's output is only known to the model.
Batch = Mapping[str, Tensor]
#: Bytes of metric arguments that are held on a device.
HELD_BYTES = 64 << 20


@dataclass(frozen=True)
class ValidationMetric:
    """Describes a torchmetrics metric and its arguments.

    The method `validation_metrics()` of a Lightning module returns a dict of these objects by name.
    The value of the metric `accuracy` over the whole validation set is logged as `val_accuracy`.

    Attributes:
        metric: A new metric object.
        arguments: Maps a micro batch and the model's output to the arguments of the metric's
            `update`. The arguments are tensors (B, ...); padding samples are then removed.
        higher_is_better: The direction for `--best-by`. The default is the metric's own attribute.
    """

    metric: Metric
    arguments: Callable[[Any, Any], tuple[Tensor, ...]]
    higher_is_better: bool | None = None


class ValidationMetrics(pl.Callback):
    """Computes the metrics of a Lightning module exactly at each validation.

    Each micro batch updates the metrics on the last pipeline stage, where the model's output is. At
    the end of the validation, torchmetrics gathers the metric states over the data-parallel ranks.

    To remove padding, the host has to know which samples are padding, and would wait for the GPU in
    each micro batch. So micro batches are held, and the host reads once which of them have padding.
    """

    def __init__(self, metrics: Mapping[str, ValidationMetric]) -> None:
        self.metrics = metrics
        self._held: list[tuple[str, Tensor, tuple[Tensor, ...]]] = []
        self._held_bytes = 0

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resets the metrics, and begins to observe the micro batches."""
        self._held, self._held_bytes = [], 0  # of a validation that was interrupted
        for each in self.metrics.values():
            metric = each.metric.to(trainer.strategy.root_device)
            metric.process_group = parallel_state.get_data_parallel_group()
            metric.sync_on_compute = parallel_state.get_data_parallel_world_size() > 1
            metric.reset()
        if self._update not in observers(trainer):
            observers(trainer).append(self._update)

    def _update(self, batch: Batch, output: Any) -> None:
        real = real_samples(batch) if "loss_mask" in batch else torch.tensor(True)
        for name, each in self.metrics.items():
            arguments = each.arguments(batch, output)
            if real.dim() and not all(len(argument) == len(real) for argument in arguments):
                raise ValueError(
                    f"validation metric {name}: its arguments have {len(arguments[0])} rows, "
                    f"and the batch has {len(real)} samples. Return tensors (B, ...)."
                )
            # The loss may change the output in place.
            self._held.append((name, real, tuple(argument.clone() for argument in arguments)))
            self._held_bytes += sum(argument.nbytes for argument in arguments)
        if self._held_bytes > HELD_BYTES:
            self._update_from_held()

    def _update_from_held(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        is_whole = torch.stack([real.all() for _, real, _ in held]).tolist() if held else []
        for (name, real, arguments), whole in zip(held, is_whole, strict=True):
            kept = arguments if whole else tuple(argument[real] for argument in arguments)
            if len(kept[0]):
                self.metrics[name].metric.update(*kept)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the value of each metric; all ranks log the same value.

        Raises:
            UserError: The loss returned a value with the name of a metric.
        """
        values = {}
        self._update_from_held()
        if parallel_state.is_pipeline_last_stage():
            values = {name: each.metric.compute() for name, each in self.metrics.items()}
            values = scalars_of(values, "a validation metric")
        for name, value in FromLastStage()(values, trainer.strategy.root_device).items():
            if name in require_attribute(trainer.strategy, "validated_names"):
                raise UserError(
                    f"validation metric {name!r}: the loss also returns a value of this name. Use "
                    "another name in validation_metrics() or in the loss."
                )
            pl_module.log(f"val_{name}", value, batch_size=1, logger=False)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops observing."""
        observers(trainer).remove(self._update)


def observers(trainer: pl.Trainer) -> list[Callable[[Any, Any], None]]:
    """Returns the functions that the strategy calls with each validated micro batch."""
    found: list[Callable[[Any, Any], None]] | None = getattr(trainer.strategy, "observers", None)
    if found is None:
        raise UserError(
            f"{type(trainer.strategy).__name__} does not show callbacks the validated micro "
            "batches. Use megakit's ExactStrategy, or leave out the callback, as `LogPictures`."
        )
    return found


class FromLastStage:
    """Broadcasts named values from the last pipeline stage to all stages.

    The first call broadcasts the names. Every call broadcasts one tensor of values.
    """

    names: list[str] | None = None

    def __call__(
        self, values: Tensor | Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Tensor]:
        """Returns the values of the last stage as float32 scalars, on every stage.

        Raises:
            ValueError: A value is not a scalar, or the names differ from the first call's names.
        """
        is_last = parallel_state.is_pipeline_last_stage()
        own = scalars_of(values, "the loss's reduce") if is_last else {}
        if is_last and list(own) != (self.names or list(own)):
            raise ValueError(
                f"the loss's reduce returned {', '.join(own)}, and before that "
                f"{', '.join(self.names or ())}. Return the same names in every step."
            )
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            self.names = list(own)
            return own
        group = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        if self.names is None:
            parts = [list(own)]
            torch.distributed.broadcast_object_list(parts, last, group)
            self.names = parts[0]
        stacked = torch.zeros(len(self.names), device=device)
        if is_last:
            stacked = torch.stack([value.to(device) for value in own.values()])
        torch.distributed.broadcast(stacked, last, group)
        return dict(zip(self.names, stacked.unbind(), strict=True))


def log_validated(
    values: Mapping[str, Tensor], module: pl.LightningModule, weight: Tensor | None
) -> None:
    """Logs the values of a validation step, whose mean over the steps is logged as `val_<name>`.

    Args:
        values: The values of the loss by name.
        module: The Lightning module.
        weight: The weight of the step, such as its number of tokens. Without a weight, steps count
            equally: the data loader pads all to one size.
    """
    # The smallest number makes the mean of a validation without tokens 0 instead of NaN.
    least = sys.float_info.min
    size: Any = 1 if weight is None else weight.double().clamp(min=least)
    for name, value in values.items():
        module.log(
            f"val_{name}",
            value.double(),  # Lightning then computes the mean in float64
            on_step=False,
            on_epoch=True,
            logger=False,
            batch_size=size,
        )


def scalars_of(values: Tensor | Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Returns named values as float32 scalars; a single tensor gets the name `loss`.

    Raises:
        ValueError: A value is not one number.
    """
    named = values if isinstance(values, Mapping) else {"loss": values}
    device = next((v.device for v in named.values() if isinstance(v, Tensor)), None)
    scalars = {}
    for name, value in named.items():
        tensor = torch.as_tensor(value, device=device).detach()
        if tensor.numel() != 1:
            raise ValueError(
                f"{source} returned {name!r} of shape {tuple(tensor.shape)}: a named value has to "
                "be one number. Return the mean, or several names."
            )
        scalars[name] = tensor.float().reshape(())
    return scalars


def real_samples(batch: Batch) -> Tensor:
    """Returns a mask of an evaluation batch, True for samples that are not padding: bool (B,)."""
    mask = batch["loss_mask"]
    return (mask > 0).reshape(len(mask), -1).any(dim=1)


def has_outputs() -> bool:
    """Tells whether this rank has model outputs that no other rank has."""
    is_first_shard = parallel_state.get_tensor_model_parallel_rank() == 0
    return is_first_shard and parallel_state.is_pipeline_last_stage()


def gather_from_ranks(value: T, trainer: pl.Trainer) -> list[T]:
    """Returns the values of all ranks on rank 0, and an empty list on other ranks."""
    if trainer.world_size == 1:
        return [value]
    values = [value] * trainer.world_size if trainer.is_global_zero else None
    torch.distributed.gather_object(value, values)
    return values or []


def on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces tensors of a GPU by copies on the host; waits once, not for each tensor."""
    copies = {
        # Without page-locked memory, each copy would wait.
        name: torch.empty_like(each, device="cpu", pin_memory=True).copy_(each, non_blocking=True)
        for name, each in values.items()
        if isinstance(each, Tensor) and each.is_cuda
    }
    if copies:
        torch.cuda.current_stream().synchronize()
    return {**values, **copies}


def callbacks_of(trainer: pl.Trainer, kind: type[T]) -> list[T]:
    """Returns the trainer's callbacks of a class; Lightning does not declare this attribute."""
    return [
        callback
        for callback in require_attribute(trainer, "callbacks")
        if isinstance(callback, kind)
    ]


def higher_is_better(column: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
    """Tells whether the best value of a validated column is the highest one.

    A metric or its `ValidationMetric` has an attribute `higher_is_better`. A loss or a callback may
    have an attribute `higher_is_better`, a collection of names. By default the lowest value is
    best.

    Raises:
        UserError: Neither a metric nor its `ValidationMetric` defines the direction.
    """
    name = column.removeprefix("val_")
    for callback in callbacks_of(trainer, ValidationMetrics):
        if name in callback.metrics:
            each = callback.metrics[name]
            declared = each.higher_is_better
            found = each.metric.higher_is_better if declared is None else declared
            if found is None:
                raise UserError(
                    f"--best-by {column}: {type(each.metric).__name__} does not say whether higher "
                    "is better. Say so with ValidationMetric(..., higher_is_better=...)."
                )
            return found
    make_loss = getattr(pl_module, "validation_loss_reduction", None)
    sources = [*([make_loss()] if callable(make_loss) else []), *callbacks_of(trainer, object)]
    return any(name in getattr(source, "higher_is_better", ()) for source in sources)
