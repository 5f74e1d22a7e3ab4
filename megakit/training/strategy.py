"""Changes NeMo's MegatronStrategy: a shorter way to Megatron's schedule, and exact validation."""

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import launchers
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_tensor_shapes
from megatron.core.transformer import TransformerConfig
from nemo import lightning as nl
from nemo.lightning import megatron_parallel
from nemo.lightning.io.pl import MegatronCheckpointIO
from nemo.lightning.megatron_parallel import CallbackMethods, MegatronLossReduction
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch import Tensor

from megakit.checkpoints.manifest import MANIFEST, WEIGHTS, read_manifest
from megakit.data.device import copied
from megakit.errors import UserError
from megakit.models.loading import check_finite
from megakit.runtime.patching import require_attribute
from megakit.runtime.saving import write_in_threads
from megakit.training.loop import use_step_loop
from megakit.training.losses import MeanLossReduction
from megakit.training.optimizer import check_saved_format, use_fused_adam
from megakit.training.validation import FromLastStage

#: A training step's loss, or a loss and further values by name.
StepOutput = Tensor | dict[str, Tensor]

#: The name under which the last pipeline stage sends a validation step's number of tokens.
_WEIGHT = "_num_tokens"

#: Private names of the frameworks that this module needs.
_SubprocessScriptLauncher: Any = require_attribute(launchers, "_SubprocessScriptLauncher")
_ModuleStepFunction = require_attribute(megatron_parallel, "_ModuleStepFunction")
require_attribute(nl.MegatronStrategy, "_configure_launcher")


@dataclass(frozen=True)
class Step:
    """Holds what all steps of one kind have in common: training, validation or prediction.

    Attributes:
        run: Megatron's schedule; needs the data and the number of micro batches.
        loss: Reduces the reports of the micro batches.
    """

    run: Callable[..., Any]
    loss: MegatronLossReduction


class ExactStrategy(nl.MegatronStrategy):
    """Runs steps like NeMo's MegatronStrategy, with less logging and an exact validation loss.

    NeMo's strategy logs five values at every step through Lightning, and notifies callbacks of
    eight events of `MegatronParallel`. Both take longer than the step of a small model. Here, a
    step calls Megatron's schedule, and returns its loss; callbacks log at their own interval.

    Takes all arguments of NeMo's strategy, and `timeout` of Lightning's: how long a rank waits for
    another rank. Checkpoints are written in this process, before the next step begins: NeMo's
    processes would import the main script again.

    Attributes:
        grad_norm: Norm of the last step's gradient before clipping; None before the first step.
        observers: Functions that are called with each micro batch of a validation and the model's
            output, on the last pipeline stage.
    """

    grad_norm: float | None = None
    ckpt_load_strictness: Any  # NeMo sets this attribute without a type

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ours = {
            "ckpt_async_save": False,
            # The only format of the distributed optimizer that torch's Adam can be loaded from.
            "ckpt_optim_fully_reshardable": True,
            "replace_progress_bar": False,
        }
        super().__init__(*args, **(ours | kwargs))
        self.observers: list[Callable[[Any, Any], None]] = []
        self._steps: dict[str, Step] = {}
        self._from_last_stage = FromLastStage()

    # --- Set-up ---

    def _configure_launcher(self) -> None:
        """Chooses the launcher of the ranks; a single process gets one that works in a notebook."""
        super()._configure_launcher()
        if self.launcher is not None and self.num_processes == self.num_nodes == 1:
            self._launcher = _SingleProcessLauncher(self.cluster_environment, 1, 1)

    @property
    def root_device(self) -> torch.device:
        """The device of this rank; Slurm may show each process only its own GPU."""
        devices = self.parallel_devices
        assert devices is not None
        return devices[self.local_rank % len(devices)]

    def connect(self, model: pl.LightningModule) -> None:
        """Writes layout and precision into the model's config.

        The distributed optimizer is used if the strategy's `ddp` or the optimizer's config says so;
        NeMo would follow the optimizer's config, which is usually a default.
        """
        optimizer = getattr(getattr(model, "optim", None), "config", None)
        if isinstance(optimizer, OptimizerConfig) and self.ddp_config is not None:
            optimizer.use_distributed_optimizer |= self.ddp_config.use_distributed_optimizer
        super().connect(model)

    def setup_distributed(self) -> None:
        """Sets up the process groups; a single CPU process needs no network port."""
        write_in_threads()
        use_fused_adam()
        if self.cluster_environment.world_size() == 1 and self.root_device.type == "cpu":
            self.store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # from C++
        # NeMo reads the timeout of the first process group from the variable of torch's NCCL
        # heartbeat, which ends a process whose watchdog is slower than that. Megatron sets half an
        # hour on all other groups. A later change has no effect in gloo.
        timeout: timedelta = require_attribute(self, "_timeout")
        minutes = timeout.total_seconds() / 60
        with (
            _with_options(torch.distributed, "init_process_group", timeout=timeout),
            _with_options(
                parallel_state, "initialize_model_parallel", distributed_timeout_minutes=minutes
            ),
        ):
            super().setup_distributed()

    def setup(self, trainer: pl.Trainer) -> None:
        """Builds the model, and prepares the trainer's loop.

        Raises:
            UserError: The model would train wrongly, or a callback would never be called.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            use_step_loop(trainer)
        super().setup(trainer)
        self._refuse_listeners()
        if trainer.state.fn == TrainerFn.FITTING:
            self._refuse_wrong_gradients()

    def setup_megatron_parallel(self, trainer: pl.Trainer) -> None:
        """Sets up Megatron's parallel model, and forgets the steps of an earlier model."""
        super().setup_megatron_parallel(trainer)
        self._steps.clear()

    def _refuse_listeners(self) -> None:
        """Refuses whoever listens to NeMo's events of a step, which nobody would tell them."""
        for event, listeners in self.model.callbacks.callbacks.items():
            for listener in listeners:
                method = getattr(type(listener), event)
                is_empty = method is getattr(CallbackMethods, event)
                # NeMo's sampler hands on its sizes, which this strategy reads itself.
                is_sampler = method is getattr(MegatronDataSampler, event, None)
                if is_sampler and (listener.output_log or listener.rampup_batch_size is not None):
                    raise UserError(
                        "The data sampler has output_log=True or a rampup_batch_size, which need "
                        "NeMo's events of a step. Leave them out, or use nl.MegatronStrategy."
                    )
                if not (is_empty or is_sampler):
                    raise UserError(
                        f"{type(listener).__name__}.{event}: ExactStrategy does not call this. Use "
                        "`trainer.strategy.observers`, or nl.MegatronStrategy."
                    )

    def _refuse_wrong_gradients(self) -> None:
        """Refuses two settings of a transformer's config that would give wrong gradients."""
        config = require_attribute(self.model[0], "config")
        if not isinstance(config, TransformerConfig):
            return
        is_first = parallel_state.is_pipeline_first_stage()
        divides = any(map(_divides_sequence, self.model.modules()))
        if config.sequence_parallel and is_first and not divides:
            raise UserError(
                "sequence_parallel=True: no layer of the model divides the sequence over the "
                "tensor-parallel ranks. Leave it out. Or divide the sequence after the embedding "
                "by Megatron's scatter_to_sequence_parallel_region, and set `divides_sequence = "
                "True` in the class of the model."
            )
        loss = self._step("training").loss
        if config.calculate_per_token_loss and isinstance(loss, MeanLossReduction):
            raise UserError(
                f"calculate_per_token_loss=True: {type(loss).__name__} returns means, not sums and "
                "token counts. Leave it out, or derive the loss from TokenMeanLossReduction."
            )

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], selective_restore: bool = False
    ) -> dict[str, Any]:
        """Loads a checkpoint; resuming requires the run's own names and shapes, and its step.

        Raises:
            UserError: Only one of the checkpoint's and the run's optimizers is distributed.
            ValueError: A value is NaN or infinite, or the manifest is of another step.
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
            check_finite({key: part for key, part in checkpoint.items() if key != "callbacks"})
            folder = Path(checkpoint_path)
            folder = folder.parent if folder.name == WEIGHTS else folder  # NeMo passes the weights
            step = checkpoint["global_step"]
            if (folder / MANIFEST).is_file() and read_manifest(folder).step != step:
                raise ValueError(f"its weights are of step {step}, and its manifest is not")
        return checkpoint

    def process_dataloader(self, dataloader: Any) -> Any:
        """Tells NeMo's own data sampler what a loader is for; by default, it is for training."""
        stage = self.trainer.state.stage
        if getattr(dataloader, "mode", "train") == "train" and stage is not None:
            part = stage.dataloader_prefix
            dataloader.mode = "validation" if part == "val" else part
        return super().process_dataloader(dataloader)

    # --- Steps ---

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
            return self._run_schedule("training", dataloader_iter)

    def validation_step(
        self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any
    ) -> StepOutput:
        """Runs a validation step; logs `val_loss` and the loss's other values on every rank.

        If the loss's `reduce` returns a dict, its value `NAME` is logged as `val_NAME`. All values
        of a validation are means over its steps. If `reduce` sets the loss's attribute
        `num_tokens`, the means are weighted by this number.
        """
        with self.precision_plugin.val_step_context():
            result = self._run_schedule("validation", dataloader_iter)
        named = result if isinstance(result, dict) else {"loss": result}
        if (num_tokens := getattr(self._step("validation").loss, "num_tokens", None)) is not None:
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

    def test_step(self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a test step; returns what the loss's `reduce` returns."""
        with self.precision_plugin.test_step_context():
            return self._run_schedule("test", dataloader_iter)

    def predict_step(self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a prediction step; returns the outputs on the last pipeline stage, else 0."""
        with self.precision_plugin.predict_step_context():
            return self._run_schedule("predict", dataloader_iter)

    @property
    def validated_names(self) -> list[str]:
        """The names of the values that the loss returned in validation."""
        return [name for name in self._from_last_stage.names or [] if name != _WEIGHT]

    def _run_schedule(self, kind: str, dataloader_iter: Iterator[Any]) -> Any:
        """Runs Megatron's schedule over the micro batches of a step, and reduces their reports."""
        step, sampler = self._step(kind), self.data_sampler
        reports = step.run(data_iterator=dataloader_iter, num_microbatches=sampler.num_microbatches)
        # Only the last pipeline stage has reports.
        return step.loss.reduce(reports) if reports else torch.zeros((), device=self.root_device)

    def _step(self, kind: str) -> Step:
        if kind not in self._steps:
            self._steps[kind] = self._make_step(kind)
        return self._steps[kind]

    def _make_step(self, kind: str) -> Step:
        """Finds the module's methods for a kind of step; NeMo looks them up at every step."""
        chunk, module, plugin = self.model[0], self.model.module, self.precision_plugin
        make_loss = _ModuleStepFunction.from_loss_reduction(module, kind)
        data_step = _ModuleStepFunction.from_data_step(module, kind)
        next_batch = data_step(chunk) if data_step else self._next_batch
        compute = _ModuleStepFunction.from_forward_step(module, kind)(chunk)
        loss = make_loss(module)
        is_first = parallel_state.is_pipeline_first_stage()
        is_last = parallel_state.is_pipeline_last_stage()
        observers = self.observers if kind == "validation" and is_last else ()
        shape = None if is_first and is_last else self._stage_shape()

        def forward(data: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            batch = next_batch(data)
            if is_first:
                batch = plugin.convert_input(batch)
            output = compute(model, batch)
            if is_last:
                output = plugin.convert_output(output)
            else:
                _check_shape(output, shape)
            for observe in observers:
                observe(batch, output)
            return output, functools.partial(loss.forward, batch)

        run = functools.partial(
            get_forward_backward_func(),
            forward_step_func=forward,
            model=_AttributeCache(chunk),
            seq_length=self.data_sampler.seq_len,
            micro_batch_size=self.data_sampler.micro_batch_size,
            forward_only=kind != "training",
            adjust_tensor_shapes_fn=shape and (lambda *of_neighbours: ([shape], [shape])),
        )
        return Step(run, loss)

    def _stage_shape(self) -> tuple[int, ...]:
        """Returns the shape of what pipeline stages send: (sequence, micro batch, width)."""
        config, sampler = require_attribute(self.model[0], "config"), self.data_sampler
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

    def _next_batch(self, dataloader_iter: Iterator[Any]) -> Any:
        """Returns the next batch on the device, like NeMo's default, but without waiting for it."""
        batch = next(dataloader_iter)
        if isinstance(batch, tuple) and len(batch) == 3:  # with Lightning's two indices
            batch = batch[0]
        return copied(batch, self.root_device)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> tuple[bool, float | Tensor | None, int | None]:
        """Makes an optimizer step, and stores the gradient norm; NeMo logs it at every step.

        Raises:
            UserError: The norm is NaN or infinite at the first step of this start.
            RuntimeError: The norm is NaN or infinite at a later step.
        """
        is_first = self.grad_norm is None  # the first step of this start
        output: tuple[bool, Any, int | None]
        if self._has_gradient_hooks:
            output = super(nl.MegatronStrategy, self).optimizer_step(
                optimizer, closure, model, **kwargs
            )
        else:
            output = optimizer.step(closure)  # type: ignore[assignment]
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

    @functools.cached_property
    def _has_gradient_hooks(self) -> bool:
        """Whether a hook sees the gradients; Lightning's precision plugin calls these hooks."""
        trainer, module = self.trainer, self.lightning_module
        names = ("on_before_optimizer_step", "configure_gradient_clipping")
        return (
            trainer.gradient_clip_val is not None
            or any(is_overridden(name, module, pl.LightningModule) for name in names)
            or any(
                is_overridden(names[0], callback, pl.Callback)
                for callback in require_attribute(trainer, "callbacks")
            )
        )


def _divides_sequence(module: torch.nn.Module) -> bool:
    if isinstance(module, LanguageModelEmbedding):
        return bool(module.scatter_to_sequence_parallel)
    return getattr(module, "divides_sequence", False) is True


def _check_shape(output: Tensor, shape: tuple[int, ...] | None) -> None:
    """Checks what a pipeline stage sends; the next stage would wait for the rest without end.

    Raises:
        UserError: The model's output has another shape than the config says.
    """
    if tuple(output.shape) != shape:
        raise UserError(
            f"A pipeline stage returned a tensor {tuple(output.shape)}, and the next stage expects "
            f"{shape}: (sequence length, micro batch, width). Set `stage_shape` in the model's "
            "config to (sequence length, width)."
        )


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
