"""Changes NeMo's MegatronStrategy: a shorter way to Megatron's schedule, and exact validation."""

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
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
from megatron.core.transformer import TransformerConfig
from nemo import lightning as nl
from nemo.lightning.io.pl import MegatronCheckpointIO
from nemo.lightning.megatron_parallel import CallbackMethods
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch import Tensor

from megakit.checkpoints.manifest import MANIFEST, WEIGHTS, read_manifest
from megakit.errors import UserError
from megakit.models.loading import check_finite
from megakit.runtime.patching import is_stock, require_attribute
from megakit.runtime.saving import write_in_threads
from megakit.training.loop import saved_steps, use_step_loop
from megakit.training.losses import MeanLossReduction
from megakit.training.optimizer import check_saved_format, use_fused_adam
from megakit.training.schedule import Step, make_step
from megakit.training.validation import FromLastStage

#: A training step's loss, or a loss and further values by name.
StepOutput = Tensor | dict[str, Tensor]

#: The name under which the last pipeline stage sends a validation step's number of tokens.
_WEIGHT = "_num_tokens"

#: Private names of the frameworks that this module needs.
_SubprocessScriptLauncher: Any = require_attribute(launchers, "_SubprocessScriptLauncher")
require_attribute(nl.MegatronStrategy, "_configure_launcher")


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
        opens_data_at: When Lightning began to open the data, by `time.perf_counter()`.
    """

    grad_norm: float | None = None
    ckpt_load_strictness: Any  # NeMo sets this attribute without a type

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ours = {
            "ckpt_async_save": False,
            # In NeMo's default format, a distributed optimizer resumes in some layouts only.
            "ckpt_optim_fully_reshardable": True,
            "replace_progress_bar": False,
        }
        super().__init__(*args, **(ours | kwargs))
        self.observers: list[Callable[[Any, Any], None]] = []
        self._steps: dict[str, Step] = {}
        self._from_last_stage = FromLastStage()

    # --- Set-up -----------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Chooses the launcher of the ranks; a single process gets one that works in a notebook."""
        super()._configure_launcher()
        if self.launcher is not None and self.num_processes == self.num_nodes == 1:
            self._launcher = _SingleProcessLauncher(self.cluster_environment, 1, 1)

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

    def setup_environment(self) -> None:
        """Sets up this process; Lightning opens the data next."""
        super().setup_environment()
        self.opens_data_at = time.perf_counter()

    def setup(self, trainer: pl.Trainer) -> None:
        """Builds the model, and prepares the trainer's loop.

        Raises:
            UserError: The model would train wrongly, or a callback would never be called.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            use_step_loop(trainer)
            if self.ckpt_load_strictness is None:
                self.ckpt_load_strictness = StrictHandling.RAISE_ALL
        super().setup(trainer)
        self._refuse_listeners()
        if trainer.state.fn == TrainerFn.FITTING:
            config = require_attribute(self.model[0], "config")
            refuse_wrong_gradients(config, self.model, self._step("training").loss)

    def setup_megatron_parallel(self, trainer: pl.Trainer) -> None:
        """Sets up Megatron's parallel model, and forgets the steps of an earlier model."""
        super().setup_megatron_parallel(trainer)
        self._steps.clear()
        self._from_last_stage = FromLastStage()
        scope = getattr(require_attribute(self.model[0], "config"), "cuda_graph_scope", None)
        if len(self.model) > 1 or scope == "full_iteration":
            raise UserError(
                "virtual_pipeline_model_parallel_size and cuda_graph_scope='full_iteration': "
                "ExactStrategy has neither. Leave them out, or use nl.MegatronStrategy."
            )

    def _refuse_listeners(self) -> None:
        """Refuses whoever listens to NeMo's events of a step, which nobody would tell them."""
        sampler = self.data_sampler
        if getattr(sampler, "output_log", False) or getattr(sampler, "rampup_batch_size", None):
            raise UserError(
                "The data sampler has output_log=True or a rampup_batch_size, which need NeMo's "
                "events of a step. Leave them out, or use nl.MegatronStrategy."
            )
        for event, listeners in self.model.callbacks.callbacks.items():
            known = {getattr(cls, event, None) for cls in (CallbackMethods, MegatronDataSampler)}
            for listener in listeners:
                if getattr(type(listener), event) not in known:
                    raise UserError(
                        f"{type(listener).__name__}.{event}: ExactStrategy does not call this. Use "
                        "`trainer.strategy.observers`, or nl.MegatronStrategy."
                    )

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], selective_restore: bool = False
    ) -> dict[str, Any]:
        """Loads a checkpoint; resuming requires finite values, and everywhere the same step.

        Raises:
            UserError: Only one of the checkpoint's and the run's optimizers is distributed.
            KeyError: The checkpoint has no state of the loops.
            ValueError: A value is NaN or infinite, or the steps in the checkpoint differ.
        """
        if selective_restore or self.trainer.state.fn != TrainerFn.FITTING:
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, selective_restore)
            return loaded
        # NeMo's own method returns a guess if the checkpoint has no metadata.
        preprocess = require_attribute(MegatronCheckpointIO, "_preprocess_checkpoint_load_path")
        metadata = dist_checkpointing.load_content_metadata(preprocess(checkpoint_path))
        is_distributed = getattr(self.ddp_config, "use_distributed_optimizer", False)
        check_saved_format(metadata, is_distributed)
        loaded = super().load_checkpoint(checkpoint_path)
        check_finite({key: part for key, part in loaded.items() if key != "callbacks"})
        steps = {"the weights": loaded["global_step"], **saved_steps(loaded["loops"])}
        folder = Path(checkpoint_path)
        folder = folder.parent if folder.name == WEIGHTS else folder  # NeMo passes the weights
        if (folder / MANIFEST).is_file():
            steps["the manifest"] = read_manifest(folder).step
        if len(set(steps.values())) != 1:
            told = ", ".join(f"{name} of step {step}" for name, step in steps.items())
            raise ValueError(f"its steps differ: {told}")
        return loaded

    def process_dataloader(self, dataloader: Any) -> Any:
        """Tells NeMo's own data sampler what a loader is for; by default, it is for training."""
        stage = self.trainer.state.stage
        if getattr(dataloader, "mode", "train") == "train" and stage is not None:
            part = stage.dataloader_prefix
            dataloader.mode = "validation" if part == "val" else part
        return super().process_dataloader(dataloader)

    # --- Steps ------------------------------------------------------------------------------------

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
            if is_stock() and parallel_state.get_pipeline_model_parallel_world_size() == 1:
                return self.model.training_step(dataloader_iter)  # by NeMo's MegatronParallel
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
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "logger": False}
        for name, value in values.items():
            # From float64 values, Lightning computes the mean in float64.
            self.lightning_module.log(f"val_{name}", value.double(), batch_size=weight, **options)
        return values if len(values) > 1 else values["loss"]

    @property
    def validated_names(self) -> list[str]:
        """The names of the values that the loss returned in validation."""
        return [name for name in self._from_last_stage.names or [] if name != _WEIGHT]

    def test_step(self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a test step; returns what the loss's `reduce` returns."""
        with self.precision_plugin.test_step_context():
            return self._run_schedule("test", dataloader_iter)

    def predict_step(self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a prediction step; returns the outputs on the last pipeline stage, else 0."""
        with self.precision_plugin.predict_step_context():
            return self._run_schedule("predict", dataloader_iter)

    def _step(self, kind: str) -> Step:
        if kind not in self._steps:
            self._steps[kind] = make_step(kind, self)
        return self._steps[kind]

    def _run_schedule(self, kind: str, dataloader_iter: Iterator[Any]) -> Any:
        """Runs Megatron's schedule over the micro batches of a step, and reduces their reports."""
        result = self._step(kind).run(dataloader_iter, self.data_sampler.num_microbatches)
        return torch.zeros((), device=self.root_device) if result is None else result

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
        step: Any = optimizer.step
        if self._has_gradient_hooks:
            ours = super(nl.MegatronStrategy, self).optimizer_step
            step = functools.partial(ours, optimizer, model=model, **kwargs)
        output: tuple[bool, Any, int | None] = step(closure=closure)
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
        before, clipping = "on_before_optimizer_step", "configure_gradient_clipping"
        callbacks: list[pl.Callback] = require_attribute(trainer, "callbacks")
        return (
            trainer.gradient_clip_val is not None
            or any(is_overridden(name, module, pl.LightningModule) for name in (before, clipping))
            or any(is_overridden(before, callback, pl.Callback) for callback in callbacks)
        )


def refuse_wrong_gradients(config: object, model: torch.nn.Module, loss: object) -> None:
    """Refuses two settings of a transformer's config that would give wrong gradients.

    Raises:
        UserError: The model has the whole sequence on each of the ranks that divide it, or the
            gradient of a mean is divided by the number of tokens.
    """
    if not isinstance(config, TransformerConfig):
        return
    is_first = parallel_state.is_pipeline_first_stage()
    if config.sequence_parallel and is_first and not any(map(_divides_sequence, model.modules())):
        raise UserError(
            "sequence_parallel=True: no layer of the model divides the sequence over the "
            "tensor-parallel ranks. Leave it out. Or divide the sequence after the embedding by "
            "Megatron's scatter_to_sequence_parallel_region, and set `divides_sequence = True` in "
            "the class of the model."
        )
    if config.calculate_per_token_loss and isinstance(loss, MeanLossReduction):
        raise UserError(
            f"calculate_per_token_loss=True: {type(loss).__name__} returns means, not sums and "
            "token counts. Leave it out, or derive the loss from TokenMeanLossReduction."
        )


def _divides_sequence(module: torch.nn.Module) -> bool:
    if isinstance(module, LanguageModelEmbedding):
        return bool(module.scatter_to_sequence_parallel)
    return getattr(module, "divides_sequence", False) is True


@contextlib.contextmanager
def _with_options(module: Any, name: str, **options: Any) -> Iterator[None]:
    """Sets options of every call of a module's function inside the block."""
    function = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: function(*args, **(kwargs | options)))
    try:
        yield
    finally:
        setattr(module, name, function)


class _SingleProcessLauncher(_SubprocessScriptLauncher):
    """Launches nothing, for a job of a single process; Lightning accepts it in a notebook."""

    is_interactive_compatible = True
