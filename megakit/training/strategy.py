"""Changes NeMo's MegatronStrategy: a shorter way to Megatron's schedule, and exact validation."""

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from torch import Tensor

from megakit.errors import USE_ANOTHER, UserError, reading
from megakit.models.partial_loading import check_finite
from megakit.runtime.patching import is_stock, require_attribute
from megakit.runtime.writer_threads import write_in_threads
from megakit.training.buffers import (
    average_running_statistics,
    batch_norms,
    refuse_different_buffers,
)
from megakit.training.cuda_graph import StepGraph, use_stream
from megakit.training.micro_batches import Step, make_step
from megakit.training.optimizer import check_saved_format, content_metadata, patch_optimizers
from megakit.training.process_groups import SingleProcessLauncher, one_timeout
from megakit.training.step_checks import (
    check_norm,
    check_steps,
    refuse_listeners,
    refuse_wrong_gradients,
)
from megakit.training.step_loop import use_step_loop
from megakit.training.validation import FromLastStage, log_validated

#: A training step's loss, or a loss and further values by name.
StepOutput = Tensor | dict[str, Tensor]

#: The name under which the last pipeline stage sends a validation step's number of tokens.
_WEIGHT = "_num_tokens"

#: A private name of NeMo that this module needs.
require_attribute(nl.MegatronStrategy, "_configure_launcher")


def refused(argument: str) -> UserError:
    """Returns the error for an argument of NeMo's strategy that `ExactStrategy` does not have."""
    return UserError(
        f"{argument}: ExactStrategy does not have this. Leave it out, or use nl.MegatronStrategy."
    )


class ExactStrategy(nl.MegatronStrategy):
    """NeMo's MegatronStrategy with an exact validation, in which every sample counts once.

    The samples that fill no batch count, too, and each sample has the same weight, so the loss does
    not depend on the layout (`ExactDataSampler`, `validation.py`). A training step only calls
    Megatron's schedule: NeMo's strategy logs five values at every step, and notifies callbacks of
    eight events, which takes longer than the step of a small model.

    Takes the arguments of NeMo's strategy, and `timeout` of Lightning's: how long a rank waits for
    another rank. It refuses interleaved pipeline stages, Megatron's CUDA graphs of whole steps, and
    asynchronous saves, which need processes that import the main script again.

    Args:
        cuda_graph: Whether a GPU repeats a training step as one CUDA graph, see `StepGraph`; it has
            no effect on a CPU.

    Attributes:
        grad_norm: Norm of the gradient before clipping, of the last step whose norm was read; None
            before.
        norms: The norms that are on the GPU and not read yet, of the last steps.
        batch_norms: In training, the layers of this rank that have statistics of a micro batch.
        has_batch_norm: Whether a rank has such layers.
        observers: Functions that are called with each micro batch of a validation and the model's
            output, on the last pipeline stage.
        opens_data_at: When Lightning began to open the data, by `time.perf_counter()`.
    """

    grad_norm: float | None = None
    ckpt_load_strictness: Any  # NeMo sets this attribute without a type

    def __init__(self, *args: Any, cuda_graph: bool = False, **kwargs: Any) -> None:
        ours = {
            "ckpt_async_save": False,
            # In NeMo's default format, a distributed optimizer resumes in some layouts only.
            "ckpt_optim_fully_reshardable": True,
            # Gloo gathers the optimizer's state in the memory of one host. NCCL would gather it on
            # every GPU, where a model that needs the distributed optimizer leaves no room for it.
            "distrib_optim_fully_reshardable_mem_efficient": kwargs.get(
                "use_gloo_process_groups", True
            ),
            "replace_progress_bar": False,
        }
        super().__init__(*args, **(ours | kwargs))
        if self.async_save:
            raise refused("ckpt_async_save=True")
        if self.virtual_pipeline_model_parallel_size:
            raise refused("virtual_pipeline_model_parallel_size")
        self.cuda_graph = cuda_graph
        self.step_graph: StepGraph | None = None
        self.norms: list[Tensor] = []
        self.observers: list[Callable[[Any, Any], None]] = []
        self._steps: dict[str, Step] = {}
        self._from_last_stage = FromLastStage()

    # --- Set-up -----------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Chooses the launcher of the ranks; a single process gets one that works in a notebook."""
        super()._configure_launcher()
        if self.launcher is not None and self.num_processes == self.num_nodes == 1:
            self._launcher = SingleProcessLauncher(self.cluster_environment, 1, 1)

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
        patch_optimizers()
        if self.cluster_environment.world_size() == 1 and self.root_device.type == "cpu":
            self.store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # from C++
        with one_timeout(require_attribute(self, "_timeout")):
            super().setup_distributed()

    def setup_environment(self) -> None:
        """Sets up this process; Lightning opens the data next."""
        super().setup_environment()
        self.cuda_graph &= self.root_device.type == "cuda" and not is_stock()
        if self.cuda_graph:
            use_stream(self.root_device)
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
        refuse_listeners(self)
        if trainer.state.fn == TrainerFn.FITTING:
            config = require_attribute(self.model[0], "config")
            refuse_wrong_gradients(config, self.model, self._step("training").loss)
            self.batch_norms = batch_norms(self.model)
            number = torch.tensor(
                sum(layer.training for layer in self.batch_norms), device=self.root_device
            )
            torch.distributed.all_reduce(number)  # another pipeline stage may have them
            self.has_batch_norm = bool(number)
            if self.cuda_graph:
                self.step_graph = StepGraph(self)

    def setup_megatron_parallel(self, trainer: pl.Trainer) -> None:
        """Sets up Megatron's parallel model, and forgets the steps of an earlier model."""
        super().setup_megatron_parallel(trainer)
        self._steps.clear()
        self._from_last_stage = FromLastStage()
        scope = getattr(require_attribute(self.model[0], "config"), "cuda_graph_scope", None)
        if scope == "full_iteration":
            raise refused("cuda_graph_scope='full_iteration'")

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], selective_restore: bool = False
    ) -> dict[str, Any]:
        """Loads a checkpoint; resuming requires finite values, and everywhere the same step."""
        if selective_restore or self.trainer.state.fn != TrainerFn.FITTING:
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, selective_restore)
            return loaded
        is_distributed = getattr(self.ddp_config, "use_distributed_optimizer", False)
        check_saved_format(content_metadata(checkpoint_path), is_distributed)
        loaded = super().load_checkpoint(checkpoint_path)
        with reading(checkpoint_path, USE_ANOTHER):
            check_finite({key: part for key, part in loaded.items() if key != "callbacks"})
        check_steps(loaded, Path(checkpoint_path))
        return loaded

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Saves, if all gradients' norms were finite, and the data-parallel ranks' models equal."""
        self.read()
        refuse_different_buffers(self.lightning_module.module)
        if self.cuda_graph:
            # Megatron's threads copy the weights on the default stream.
            torch.cuda.synchronize(self.root_device)
        super().save_checkpoint(*args, **kwargs)

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
        """Runs a training step through Megatron's schedule; returns what `reduce` of the loss does.

        On pipeline stages before the last stage, this method returns a loss of 0.
        """
        with self.precision_plugin.train_step_context():
            for chunk in self.model:
                chunk.zero_grad_buffer()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if is_stock() and parallel_state.get_pipeline_model_parallel_world_size() == 1:
                output = self.model.training_step(dataloader_iter)  # by NeMo's MegatronParallel
            else:
                output = self._run_schedule("training", dataloader_iter)
        # At every step: a signal can stop the run after any of them.
        average_running_statistics(self.batch_norms)
        return output

    def on_validation_start(self) -> None:
        """Checks that all data-parallel ranks validate one model."""
        super().on_validation_start()
        refuse_different_buffers(self.lightning_module.module)

    def validation_step(
        self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any
    ) -> StepOutput:
        """Runs a validation step; logs `val_loss` and the loss's other values on every rank.

        If the loss's `reduce` sets its attribute `num_tokens`, this is the weight of the step.
        """
        with self.precision_plugin.val_step_context():
            result = self._run_schedule("validation", dataloader_iter)
        named = result if isinstance(result, dict) else {"loss": result}
        if (num_tokens := getattr(self._step("validation").loss, "num_tokens", None)) is not None:
            named = {**named, _WEIGHT: num_tokens}
        values = self._from_last_stage(named, self.root_device)
        log_validated(values, self.lightning_module, weight=values.pop(_WEIGHT, None))
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
    ) -> tuple[Tensor, float | Tensor | None, int | None]:
        """Makes an optimizer step, and checks the norm of the gradient, on a GPU in `read`.

        Returns:
            What NeMo's optimizer returns: the closure's loss, the norm of the gradient before
            clipping, and the number of zeros in the gradient if Megatron's config asks for it.
        """
        step: Any = optimizer.step
        if self.has_gradient_hooks:
            ours = super(nl.MegatronStrategy, self).optimizer_step
            step = functools.partial(ours, optimizer, model=model, **kwargs)
        output: tuple[Tensor, Any, int | None] = step(closure=closure)
        if isinstance(output[1], Tensor):
            self.norms.append(output[1])
        else:
            self._check_norm(output[1], self.trainer.global_step + 1)
        return output

    def take_norms(self) -> list[Tensor]:
        """Returns the norms that are not read yet, and forgets them."""
        norms, self.norms = self.norms, []
        return norms

    def read(self, values: Sequence[Tensor] = ()) -> list[float]:
        """Reads values, and checks the norms since the last call; the host waits once for the GPU.

        Args:
            values: Scalars on this rank's device.
        """
        norms = self.take_norms()
        if not (together := [*norms, *values]):
            return []
        numbers: list[float] = torch.stack([one.double() for one in together]).tolist()
        first = self.trainer.global_step - len(norms) + 1
        for step, norm in enumerate(numbers[: len(norms)], first):
            self._check_norm(norm, step)
        return numbers[len(norms) :]

    def _check_norm(self, norm: float | None, step: int) -> None:
        is_first = self.grad_norm is None  # the first step of this start
        self.grad_norm = norm
        check_norm(norm, step, is_first)

    @functools.cached_property
    def has_gradient_hooks(self) -> bool:
        """Whether a hook sees the gradients; Lightning's precision plugin calls these hooks."""
        trainer, module = self.trainer, self.lightning_module
        before, clipping = "on_before_optimizer_step", "configure_gradient_clipping"
        callbacks: list[pl.Callback] = require_attribute(trainer, "callbacks")
        return (
            trainer.gradient_clip_val is not None
            or any(is_overridden(name, module, pl.LightningModule) for name in (before, clipping))
            or any(is_overridden(before, callback, pl.Callback) for callback in callbacks)
        )
