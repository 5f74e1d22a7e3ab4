"""Changes NeMo's MegatronStrategy: less work at every step, and an exact validation loss."""

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import launchers
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from nemo import lightning as nl
from nemo.lightning import megatron_parallel
from nemo.lightning.io.pl import MegatronCheckpointIO
from nemo.lightning.megatron_parallel import (
    CallbackMethods,
    MegatronLossReduction,
)
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch import Tensor

from megakit.data.device import copied
from megakit.data.sampler import ExactDataSampler
from megakit.errors import UserError
from megakit.runtime.patching import require_attribute
from megakit.training.model_checks import check_model
from megakit.training.optimizer import check_saved_format
from megakit.training.resumption import check_restored
from megakit.training.stage_shapes import exchange_shapes_once, forget_shapes
from megakit.training.strategy_options import (
    check_has_effect,
    check_not_overwritten,
    connect_optimizer,
)
from megakit.training.validation import FromLastStage

#: A training step's loss, or a loss and further values by name.
StepOutput = Tensor | dict[str, Tensor]

#: The name under which the last pipeline stage sends a validation step's number of tokens.
_WEIGHT = "_num_tokens"

#: Private names of the frameworks that this module needs.
_SubprocessScriptLauncher: Any = require_attribute(launchers, "_SubprocessScriptLauncher")
_ModuleStepFunction = require_attribute(megatron_parallel, "_ModuleStepFunction")
require_attribute(nl.MegatronStrategy, "_configure_launcher")


class ExactStrategy(nl.MegatronStrategy):
    """Runs steps like NeMo's MegatronStrategy, with less logging and an exact validation loss.

    NeMo's strategy logs five values at every step through Lightning, and copies a metric object for
    each value. This logging takes longer than the step of a small model. Here, a step returns its
    loss, the strategy stores the gradient norm, and callbacks log at their own interval.

    Attributes:
        grad_norm: Norm of the last step's gradient before clipping; None before the first step.
        timeout: Seconds that a rank waits for another rank.
        use_distributed_optimizer: Whether the optimizer's state is sharded over the data-parallel
            ranks; None if the optimizer module decides.
    """

    grad_norm: float | None = None
    timeout: int = 600
    use_distributed_optimizer: bool | None = None
    ckpt_load_strictness: Any  # NeMo sets this attribute without a type

    def _configure_launcher(self) -> None:
        """Chooses the launcher of the ranks; a single process gets one that works in a notebook."""
        super()._configure_launcher()
        if self.launcher is not None and self.num_processes == self.num_nodes == 1:
            self._launcher = _SingleProcessLauncher(self.cluster_environment, 1, 1)

    def connect(self, model: pl.LightningModule) -> None:
        """Writes layout and precision into the model's config.

        Raises:
            UserError: The config or the optimizer contradicts the strategy.
        """
        dtypes = getattr(self.precision_plugin, "dtype_config", None)
        check_not_overwritten(getattr(model, "config", None), self.parallelism, dtypes)
        connect_optimizer(
            getattr(model, "optim", None), self.ddp_config, self.use_distributed_optimizer
        )
        super().connect(model)

    def setup_distributed(self) -> None:
        """Sets up the process groups; a single CPU process needs no network port."""
        if self.cluster_environment.world_size() == 1 and self.root_device.type == "cpu":
            self.store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # from C++
        # NeMo reads the timeout of the first process group from the variable of torch's NCCL
        # heartbeat, which ends a process whose watchdog is slower than that. Megatron sets half an
        # hour on all other groups. A later change has no effect in gloo.
        timeout = timedelta(seconds=self.timeout)
        minutes = self.timeout / 60
        with (
            _with_options(torch.distributed, "init_process_group", timeout=timeout),
            _with_options(
                parallel_state, "initialize_model_parallel", distributed_timeout_minutes=minutes
            ),
        ):
            super().setup_distributed()

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], selective_restore: bool = False
    ) -> dict[str, Any]:
        """Loads a checkpoint; resuming requires the run's own names, shapes and types.

        Raises:
            UserError: Only one of the checkpoint's and the run's optimizers is distributed.
            ValueError: The state in the checkpoint does not fit the run: see `check_restored`.
        """
        goes_on = not selective_restore and self.trainer.state.fn == TrainerFn.FITTING
        if goes_on:
            # NeMo's own method returns a guess if the checkpoint has no metadata.
            preprocess = require_attribute(MegatronCheckpointIO, "_preprocess_checkpoint_load_path")
            metadata = dist_checkpointing.load_content_metadata(preprocess(checkpoint_path))
            is_distributed = getattr(self.ddp_config, "use_distributed_optimizer", False)
            check_saved_format(metadata, is_distributed)
        strictness = self.ckpt_load_strictness
        if goes_on and strictness is None:
            self.ckpt_load_strictness = StrictHandling.RAISE_ALL
        try:
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, selective_restore)
        finally:
            self.ckpt_load_strictness = strictness
        if goes_on:
            check_restored(checkpoint, Path(checkpoint_path), self.trainer)
        return checkpoint

    def process_dataloader(self, dataloader: Any) -> Any:
        """Tells NeMo's own data sampler what a loader is for; by default, it is for training."""
        stage = self.trainer.state.stage
        if getattr(dataloader, "mode", "train") == "train" and stage is not None:
            part = stage.dataloader_prefix
            dataloader.mode = "validation" if part == "val" else part
        return super().process_dataloader(dataloader)

    def setup(self, trainer: pl.Trainer) -> None:
        """Builds the model; before a training, refuses a model that would train wrongly.

        Raises:
            UserError: See `check_model`.
        """
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            make_loss = getattr(self.lightning_module, "training_loss_reduction", None)
            loss = make_loss() if callable(make_loss) else None
            for chunk in self.model:
                check_model(require_attribute(chunk, "config"), chunk, loss)

    def setup_megatron_parallel(self, trainer: pl.Trainer) -> None:
        """Sets up Megatron's parallel model, and clears the caches of an earlier model."""
        super().setup_megatron_parallel(trainer)
        for chunk in self.model:
            check_has_effect(require_attribute(chunk, "config"), chunk)
        if isinstance(self.data_sampler, ExactDataSampler):  # NeMo's makes smaller last batches
            exchange_shapes_once(require_attribute(self.model[0], "config"))
        for name, attribute in vars(ExactStrategy).items():
            if isinstance(attribute, functools.cached_property):
                self.__dict__.pop(name, None)

    def teardown(self) -> None:
        """Ends the strategy; a later model of the same config may have batches of another size."""
        for chunk in getattr(self, "megatron_parallel", ()):
            forget_shapes(require_attribute(chunk, "config"))
        super().teardown()

    def training_step(
        self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any
    ) -> StepOutput:
        """Runs a training step through Megatron's schedule; returns the loss of the global batch.

        If the loss's `reduce` returns a dict of named values, this method returns the dict. On
        pipeline stages before the last stage, this method returns a loss of 0.
        """
        with self.precision_plugin.train_step_context():
            for chunk in self.model:
                chunk.zero_grad_buffer()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if self._calls_schedule:
                return self._run_schedule(dataloader_iter)
            return self.model.training_step(
                dataloader_iter, *args, **self._training_functions, **kwargs
            )

    @functools.cached_property
    def _training_functions(self) -> dict[str, Any]:
        """Returns the module's methods for a training step; NeMo looks them up at every step."""
        find, module = _ModuleStepFunction, self.model.module
        return {
            "data_step": find.from_data_step(module, "training"),
            "forward_step": find.from_forward_step(module, "training"),
            "loss_reduction": find.from_loss_reduction(module, "training"),
        }

    @functools.cached_property
    def _calls_schedule(self) -> bool:
        """Tells whether a training step can call Megatron's schedule directly.

        By default, NeMo's MegatronParallel calls the schedule, and notifies callbacks of eight
        events at every step, which takes a twelfth of the time of a small model. A direct call
        requires that only the data sampler handles these events and returns constants; a single
        pipeline stage, because several stages agree on tensor shapes; and no CUDA graph of the
        whole step, which NeMo records around the schedule.
        """
        sampler = self.data_sampler
        if not isinstance(sampler, MegatronDataSampler):
            return False

        def has_no_effect(listener: object, event: str) -> bool:
            method = getattr(type(listener), event)
            known = (getattr(CallbackMethods, event), getattr(MegatronDataSampler, event, None))
            return method in known

        return (
            parallel_state.get_pipeline_model_parallel_world_size() == 1
            and parallel_state.get_context_parallel_world_size() == 1  # NeMo divides the samples
            and sampler.rampup_batch_size is None
            and not sampler.output_log
            and not any(
                getattr(chunk.config, "cuda_graph_scope", None) == "full_iteration"
                for chunk in self.model
            )
            and all(
                has_no_effect(listener, event)
                for event, listeners in self.model.callbacks.callbacks.items()
                for listener in listeners
            )
        )

    @functools.cached_property
    def _cached_model(self) -> "_AttributeCache":
        return _AttributeCache(self.model[0])

    def _next_batch(self, dataloader_iter: Iterator[Any]) -> Any:
        """Returns the next batch on the device, like NeMo's default, but without waiting for it."""
        batch = next(dataloader_iter)
        if isinstance(batch, tuple) and len(batch) == 3:  # with Lightning's two indices
            batch = batch[0]
        return copied(batch, self.root_device)

    def _run_schedule(self, dataloader_iter: Iterator[Any]) -> StepOutput:
        """Runs a training step like NeMo's MegatronParallel, but without its events."""
        module, plugin, sampler = self.model[0], self.precision_plugin, self.data_sampler
        functions = self._training_functions
        data_step = functions["data_step"](module) if functions["data_step"] else self._next_batch
        model_step = functions["forward_step"](module)
        loss_reduction = functions["loss_reduction"](module)

        def forward_step(
            data: Iterator[Any], model: "_AttributeCache"
        ) -> tuple[Any, MegatronLossReduction]:
            batch = plugin.convert_input(data_step(data))
            output = model_step(model, batch)
            loss_reduction.setup(batch)
            return plugin.convert_output(output), loss_reduction

        reports = forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=dataloader_iter,
            model=self._cached_model,
            num_microbatches=sampler.num_microbatches,
            seq_length=sampler.seq_len,
            micro_batch_size=sampler.micro_batch_size,
        )
        return loss_reduction.reduce(reports)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | None = None,
        **kwargs: Any,
    ) -> tuple[bool, float | Tensor | None, int | None]:
        """Makes an optimizer step, and stores the gradient norm.

        Raises:
            UserError: The norm is NaN or infinite at the first step of this start.
            RuntimeError: The norm is NaN or infinite at a later step.
        """
        is_first = self.grad_norm is None  # the first step of this start
        # Skips NeMo's method, which logs the norm at every step.
        output: tuple[bool, Any, int | None]
        output = super(nl.MegatronStrategy, self).optimizer_step(
            optimizer, closure, model, **kwargs
        )
        self.grad_norm = output[1]
        if self.grad_norm is not None and not math.isfinite(self.grad_norm):
            found = f"Step {self.trainer.global_step + 1}: the gradient's norm is {self.grad_norm}"
            if is_first:  # the learning rate cannot be the cause yet
                raise UserError(
                    f"{found} with the weights that this run starts from. Use another checkpoint, "
                    "and check the data."
                )
            raise RuntimeError(f"{found}. Earlier checkpoints are not changed. Use a lower --lr.")
        return output

    def validation_step(
        self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any
    ) -> StepOutput:
        """Runs a validation step; logs `val_loss` and the loss's other values on every rank.

        If the loss's `reduce` returns a dict, its value `NAME` is logged as `val_NAME`. All values
        of a validation are means over its steps. If `reduce` sets the loss's attribute
        `num_tokens`, the means are weighted by this number.
        """
        module = self.model.module
        find = _ModuleStepFunction.from_loss_reduction(module, "validation")
        loss = find(module) if find is not None else None
        with self.precision_plugin.val_step_context():
            result = self.model.validation_step(
                dataloader_iter, *args, loss_reduction=loss, **kwargs
            )
        named = result if isinstance(result, dict) else {"loss": result}
        if (num_tokens := getattr(loss, "num_tokens", None)) is not None:
            named = {**named, _WEIGHT: num_tokens}
        values = self._from_last_stage(named, self.root_device)
        # Without a weight, steps count equally: the data loader pads all to one size. With weights,
        # the smallest number makes the mean of a validation without tokens 0 instead of NaN.
        weight: Any = values.pop(_WEIGHT, None)
        weight = 1 if weight is None else weight.double().clamp(min=sys.float_info.min)
        for name, value in values.items():
            # From float64 values, Lightning computes the mean in float64.
            self.lightning_module.log(
                f"val_{name}",
                value.double(),
                on_step=False,
                on_epoch=True,
                batch_size=weight,
                logger=False,
            )
        return values if len(values) > 1 else values["loss"]

    @property
    def validated_names(self) -> list[str]:
        """The names of the values that the loss returned in validation."""
        return [name for name in self._from_last_stage.names or [] if name != _WEIGHT]

    @functools.cached_property
    def _from_last_stage(self) -> FromLastStage:
        return FromLastStage()


@contextlib.contextmanager
def _with_options(module: Any, name: str, **options: Any) -> Iterator[None]:
    """Sets options of every call of a module's function inside the block."""
    function = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **(kwargs | options))

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, function)


class _AttributeCache:
    """Caches the attributes of a model that Megatron's schedule reads at every step.

    These attributes are four wrappers deep: without the cache, each lookup fails in each wrapper.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # Megatron searches all wrappers for these parts of a GPT model, for each micro batch.
        for part in ("decoder", "mtp"):
            if not any(hasattr(module, part) for module in model.modules()):
                vars(self)[part] = SimpleNamespace(layers=())

    def __getattr__(self, name: str) -> Any:
        value = vars(self)[name] = getattr(self._model, name)
        return value


class _SingleProcessLauncher(_SubprocessScriptLauncher):
    """Launches nothing, for a job of a single process; Lightning accepts it in a notebook."""

    is_interactive_compatible = True
