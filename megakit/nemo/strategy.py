"""Changes NeMo's MegatronStrategy: a shorter way to Megatron's schedule, and exact validation.

Its arguments, the trainer and the logger are in `build_trainer` of model_trainer.py.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from torch import Tensor

from megakit.errors import USE_ANOTHER, reading
from megakit.models.partial_loading import check_finite
from megakit.nemo.cuda_graph import StepGraph, use_stream
from megakit.nemo.micro_batches import Step, make_step
from megakit.nemo.refusals import refuse_listeners, refuse_wrong_gradients
from megakit.nemo.step_loop import use_step_loop
from megakit.nemo.validation import ExactValidation
from megakit.runtime.patching import is_stock, require_attribute
from megakit.training.batch_norm import (
    average_running_statistics,
    batch_norms,
    refuse_different_buffers,
)
from megakit.training.stopping import check_norm
from megakit.training.timeouts import one_timeout


class ExactStrategy(nl.MegatronStrategy):
    """NeMo's MegatronStrategy with an exact validation, in which every sample counts once.

    The samples that fill no batch count, too, and each sample has the same weight, so the loss does
    not depend on the layout (`ExactDataSampler`, `ExactValidation`). A training step only calls
    Megatron's schedule: NeMo's strategy logs five values at every step, and notifies callbacks of
    eight events, which takes longer than the step of a small model.

    Takes the arguments of NeMo's strategy, and `timeout` of Lightning's: how long a rank waits for
    another rank. By default, saves are synchronous, because NeMo's asynchronous saves need
    processes that import the main script again.

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
        steps: What the steps of each kind have in common; a kind is `training`, `validation`,
            `test` or `predict`.
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
            "distrib_optim_fully_reshardable_mem_efficient": True,
        }
        super().__init__(*args, **(ours | kwargs))
        self.cuda_graph = cuda_graph
        self.step_graph: StepGraph | None = None
        self.norms: list[Tensor] = []
        self._validation = ExactValidation()
        self.observers: list[Callable[[Any, Any], None]] = [self._validation.update_metrics]
        self.steps: dict[str, Step] = {}

    # --- Set-up -----------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Chooses the launcher of the ranks; a single process, as of a notebook, needs none."""
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()

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
        if self.cluster_environment.world_size() == 1 and self.root_device.type == "cpu":
            self.store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # from C++
        with one_timeout(require_attribute(self, "_timeout")):
            super().setup_distributed()

    def setup_environment(self) -> None:
        """Sets up this process, and a GPU's stream for a CUDA graph."""
        super().setup_environment()
        self.cuda_graph &= self.root_device.type == "cuda" and not is_stock()
        if self.cuda_graph:
            use_stream(self.root_device)

    def setup(self, trainer: pl.Trainer) -> None:
        """Builds the model, and prepares the trainer's loop.

        Raises:
            UserError: The model would train wrongly, or a callback would never be called.
        """
        callbacks = require_attribute(trainer, "callbacks")
        if self._validation not in callbacks:
            callbacks.append(self._validation)
        if trainer.state.fn == TrainerFn.FITTING:
            use_step_loop(trainer)
            if self.ckpt_load_strictness is None:
                self.ckpt_load_strictness = StrictHandling.RAISE_ALL
        super().setup(trainer)
        refuse_listeners(self)
        if trainer.state.fn == TrainerFn.FITTING:
            config = require_attribute(self.model[0], "config")
            self.steps["training"] = make_step("training", self)
            refuse_wrong_gradients(config, self.model, self.steps["training"].loss)
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
        self.steps.clear()

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], selective_restore: bool = False
    ) -> dict[str, Any]:
        """Loads a checkpoint, and checks that its values are finite."""
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, selective_restore)
        with reading(checkpoint_path, USE_ANOTHER):
            check_finite({key: part for key, part in loaded.items() if key != "callbacks"})
        return loaded

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Saves, if all gradients' norms were finite, and the data-parallel ranks' models equal."""
        self.read()
        refuse_different_buffers(self.lightning_module.module)
        if self.cuda_graph:
            # Megatron's threads copy the weights on the default stream.
            torch.cuda.synchronize(self.root_device)
        super().save_checkpoint(*args, **kwargs)

    # --- Steps ------------------------------------------------------------------------------------

    def training_step(self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a training step through Megatron's schedule; returns what `reduce` of the loss does.

        On pipeline stages before the last stage, this method returns a loss of 0.
        """
        self.model[0].zero_grad_buffer()
        self.optimizers[0].zero_grad()
        if is_stock() and parallel_state.get_pipeline_model_parallel_world_size() == 1:
            with self.precision_plugin.train_step_context():
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

    def validation_step(self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a validation step, whose values `ExactValidation` averages."""
        return self._run_schedule("validation", dataloader_iter)

    def test_step(self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a test step; returns what the loss's `reduce` returns."""
        return self._run_schedule("test", dataloader_iter)

    def predict_step(self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a prediction step; returns the outputs on the last pipeline stage, else 0."""
        return self._run_schedule("predict", dataloader_iter)

    def _run_schedule(self, kind: str, dataloader_iter: Iterator[Any]) -> Any:
        """Runs Megatron's schedule over the micro batches of a step, and reduces their reports."""
        if kind not in self.steps:
            self.steps[kind] = make_step(kind, self)
        with self.precision_plugin.forward_context():
            result = self.steps[kind].run(dataloader_iter, self.data_sampler.num_microbatches)
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

        def compute() -> Any:
            loss = closure()
            self.trainer.fit_loop.epoch_loop.before_optimizer_step(optimizer)
            return loss

        step: Any = optimizer.step
        output: tuple[Tensor, Any, int | None] = step(closure=compute)
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
        numbers: list[float] = torch.stack([one.double().reshape(()) for one in together]).tolist()
        first = self.trainer.global_step - len(norms) + 1
        for step, norm in enumerate(numbers[: len(norms)], first):
            self._check_norm(norm, step)
        return numbers[len(norms) :]

    def _check_norm(self, norm: float | None, step: int) -> None:
        self.grad_norm = norm
        check_norm(step, norm)
