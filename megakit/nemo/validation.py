"""Computes the values of a validation exactly: the loss, its further values, and the metrics."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from torch import Tensor
from torchmetrics import Metric

from megakit.errors import UserError
from megakit.runtime.patching import require_attribute
from megakit.training.gathering import Batch, from_last_rank, real_samples


@dataclass(frozen=True)
class ValidationMetric:
    """Describes a torchmetrics metric and its arguments.

    The method `validation_metrics()` of a Lightning module returns a dict of these objects by name.
    The value of the metric `accuracy` over the whole validation set is logged as `val_accuracy`.

    Attributes:
        metric: A metric object.
        arguments: Maps a micro batch and the model's output to the arguments of the metric's
            `update`. The arguments are tensors (B, ...); padding samples are then removed.
        higher_is_better: The direction for `--best-by`. The default is the metric's own attribute.
    """

    metric: Metric
    arguments: Callable[[Any, Any], tuple[Tensor, ...]]
    higher_is_better: bool | None = None


class ExactValidation(pl.Callback):
    """Logs the values of each validation on all ranks, named `val_loss` and `val_<name>`.

    The values of the loss are means over the steps, which count equally, because the data loader
    pads all to one size. If the loss's `reduce` sets its attribute `num_tokens`, this is the weight
    of the step. Each micro batch updates the metrics on the last pipeline stage, where the model's
    output is. At the end, torchmetrics gathers the metric states over the data-parallel ranks.

    To remove padding, the host has to know which samples are padding, and would wait for the GPU in
    each micro batch. So the host reads once in a step which micro batches have padding.
    """

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts from nothing, also if an earlier validation was interrupted."""
        self._sums: dict[str, Any] = {}
        self._weight: Any = 0
        self._held: list[tuple[str, Tensor, tuple[Tensor, ...]]] = []
        self._metrics = metrics_of(pl_module)
        for each in self._metrics.values():
            metric = each.metric.to(trainer.strategy.root_device)
            metric.process_group = parallel_state.get_data_parallel_group()
            metric.sync_on_compute = parallel_state.get_data_parallel_world_size() > 1
            metric.reset()

    def update_metrics(self, batch: Batch, output: Any) -> None:
        """Takes a micro batch and the model's output, an observer of `ExactStrategy`."""
        real = real_samples(batch) if "loss_mask" in batch else torch.tensor(True)
        for name, each in self._metrics.items():
            # The loss may change the output in place.
            arguments = tuple(argument.clone() for argument in each.arguments(batch, output))
            if real.dim() and any(argument.shape[:1] != real.shape for argument in arguments):
                shapes = " and ".join(str(tuple(argument.shape)) for argument in arguments)
                raise UserError(
                    f"validation metric {name!r}: its arguments have the shapes {shapes}, for "
                    f"{len(real)} samples. Each has to be (B, ...), a row for each sample, because "
                    "the rows of padding are removed. Flatten nothing."
                )
            self._held.append((name, real, arguments))

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """On the last pipeline stage, updates the metrics, and adds losses in float64."""
        if not parallel_state.is_pipeline_last_stage():
            return
        held, self._held = self._held, []
        is_whole = torch.stack([real.all() for _, real, _ in held]).tolist() if held else []
        for (name, real, arguments), whole in zip(held, is_whole, strict=True):
            metric = self._metrics[name].metric
            kept = arguments if whole else tuple(argument[real] for argument in arguments)
            if len(kept[0]):
                metric.update(*kept)
            elif not metric.update_called:
                take_shapes(metric, arguments)
        strategy: Any = trainer.strategy
        weight = getattr(strategy.steps["validation"].loss, "num_tokens", 1)
        self._weight = self._weight + weight
        for name, value in named(outputs).items():
            self._sums[name] = self._sums.get(name, 0) + torch.as_tensor(value).double() * weight

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the values; all ranks log the same.

        Raises:
            UserError: The loss returned a value with the name of a metric.
        """
        values = {name: float(total / self._weight) for name, total in self._sums.items()}
        metrics = {}
        if parallel_state.is_pipeline_last_stage():
            metrics = {name: float(each.metric.compute()) for name, each in self._metrics.items()}
        values, metrics = from_last_rank((values, metrics))
        for name, value in (values | metrics).items():
            if name in values and name in metrics:
                raise UserError(
                    f"validation metric {name!r}: the loss also returns a value of this name. Use "
                    "another name in validation_metrics() or in the loss."
                )
            exact = torch.tensor(value, dtype=torch.float64)
            pl_module.log(f"val_{name}", exact, batch_size=1, logger=False)


def take_shapes(metric: Metric, arguments: tuple[Tensor, ...]) -> None:
    """Gives the states of a metric without samples the shapes that they have with samples.

    A first sample may add dimensions to a state, and a process that gathers states with different
    numbers of dimensions from the ranks is aborted.
    """
    empty: dict[str, Any] = copy.deepcopy(metric.metric_state)
    metric.update(*arguments)
    for name, state in metric.metric_state.items():
        if isinstance(state, Tensor):
            empty[name] = empty[name].to(state).expand_as(state).clone()
        else:
            empty[name] = [each.reshape(-1, *each.shape[1:])[:0] for each in state]
        setattr(metric, name, empty[name])


def metrics_of(pl_module: pl.LightningModule) -> dict[str, ValidationMetric]:
    """Returns the metrics that a Lightning module describes, by name."""
    described: dict[str, ValidationMetric] = getattr(pl_module, "validation_metrics", dict)()
    return described


def named(outputs: Any) -> dict[str, Any]:
    """Returns the values of a step by name; a single value is the `loss`."""
    return outputs if isinstance(outputs, dict) else {"loss": outputs}


def higher_is_better(column: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
    """Tells whether the best value of a validated column is the highest one.

    A metric or its `ValidationMetric` has an attribute `higher_is_better`. A loss or a callback may
    have an attribute `higher_is_better`, a collection of names. By default the lowest value is
    best.

    Raises:
        UserError: Neither a metric nor its `ValidationMetric` defines the direction.
    """
    name = column.removeprefix("val_")
    if each := metrics_of(pl_module).get(name):
        declared = each.higher_is_better
        found = each.metric.higher_is_better if declared is None else declared
        if found is None:
            raise UserError(
                f"--best-by {column}: {type(each.metric).__name__} does not say whether higher is "
                "better. Say so with ValidationMetric(..., higher_is_better=...)."
            )
        return found
    module: Any = pl_module
    sources = [module.validation_loss_reduction(), *require_attribute(trainer, "callbacks")]
    return any(name in getattr(source, "higher_is_better", ()) for source in sources)
