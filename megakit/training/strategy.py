"""NeMo's MegatronStrategy without what it does at every step and nobody reads."""

import functools
import inspect
import math
import os
from typing import Any

import torch
from megatron.core import parallel_state
from nemo import lightning as nl
from nemo.lightning.megatron_parallel import CallbackConnector, _ModuleStepFunction


class ExactStrategy(nl.MegatronStrategy):
    """MegatronStrategy with less logging, and an exact validation loss.

    NeMo's logs five values at every step through Lightning, each by way of a copied metric object;
    that takes more time than the step of a small model. Here a step returns its loss, the strategy
    remembers the gradient's norm, and callbacks log at their own interval.

    Attributes:
        grad_norm: Norm of the last step's gradient before clipping, or None.
    """

    grad_norm: float | None = None

    def setup_distributed(self) -> None:
        """Sets up process groups; a process on its own needs no port for that."""
        if self.cluster_environment.world_size() == 1 and self.root_device.type == "cpu":
            self.store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # from C++
        # NeMo gives its time-out to the first group only; Megatron lets all others wait for half an
        # hour. To change it later is no use: gloo keeps to the one that a group was made with.
        seconds = int(os.environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "600"))
        initialize = parallel_state.initialize_model_parallel
        parallel_state.initialize_model_parallel = functools.partial(
            initialize, distributed_timeout_minutes=seconds / 60
        )
        try:
            super().setup_distributed()
        finally:
            parallel_state.initialize_model_parallel = initialize

    def setup_megatron_parallel(self, trainer: Any) -> None:
        """Sets up Megatron's parallel model, with a quicker way to tell callbacks of its events."""
        super().setup_megatron_parallel(trainer)
        connector = _CachingConnector()
        connector.callbacks = self.model.callbacks.callbacks
        self.model.callbacks = connector
        self.__dict__.pop("_training_functions", None)  # of another model, fitted before

    def training_step(self, dataloader_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """One step through Megatron's schedule; returns the global batch's loss.

        On pipeline stages before the last the loss is 0.
        """
        with self.precision_plugin.train_step_context():
            for chunk in self.model:
                chunk.zero_grad_buffer()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            return self.model.training_step(
                dataloader_iter, *args, **self._training_functions, **kwargs
            )

    @functools.cached_property
    def _training_functions(self) -> dict[str, Any]:
        """Which of the module's methods take part in a step: NeMo would look at every step."""
        find, module = _ModuleStepFunction, self.model.module
        return {
            "data_step": find.from_data_step(module, "training"),
            "forward_step": find.from_forward_step(module, "training"),
            "loss_reduction": find.from_loss_reduction(module, "training"),
        }

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Steps, and remembers what Megatron says of the gradient."""
        # Beyond NeMo's own method, which logs the norm at every step.
        output = super(nl.MegatronStrategy, self).optimizer_step(
            optimizer, closure, model, **kwargs
        )
        _, self.grad_norm, _ = output
        if self.grad_norm is not None and not math.isfinite(self.grad_norm):
            raise RuntimeError(
                f"Step {self.trainer.global_step + 1}: the gradient's norm is {self.grad_norm}. "
                "The checkpoints before it are untouched; try a lower --lr."
            )
        return output

    def validation_step(self, dataloader_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """One validation step; logs `val_loss`, the same on every rank."""
        with self.precision_plugin.val_step_context():
            loss = self.model.validation_step(dataloader_iter, *args, **kwargs)
        loss = from_last_pipeline_stage(loss)
        # batch_size=1 weighs all steps alike: padding makes them equal (see the data loader).
        self.lightning_module.log(
            "val_loss", loss, on_step=False, on_epoch=True, batch_size=1, logger=False
        )
        return loss


class _CachingConnector(CallbackConnector):
    """NeMo's connector, which looks at a callback's signature once and not at every event."""

    def __init__(self) -> None:
        super().__init__()
        self._accepted: dict[Any, frozenset[str] | None] = {}

    def event(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Calls the event's callbacks, each with those of the arguments that it names."""
        for callback in self.callbacks.get(name, ()):
            method = getattr(callback, name)
            key = method.__func__
            if key not in self._accepted:
                parameters = inspect.signature(method).parameters
                takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
                self._accepted[key] = None if takes_all else frozenset(parameters)
            accepted = self._accepted[key]
            if accepted is not None:
                kwargs_of_it = {k: v for k, v in kwargs.items() if k in accepted}
            else:
                kwargs_of_it = kwargs
            method(*args, **kwargs_of_it)


def from_last_pipeline_stage(value: torch.Tensor) -> torch.Tensor:
    """The last stage's value, on every stage; a scalar that only the last stage knows."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            value,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return value
