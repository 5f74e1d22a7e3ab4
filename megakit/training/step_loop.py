"""Replaces Lightning's loop over the steps of an epoch: exact after a resumption, and faster."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import loops
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from megakit.errors import UserError
from megakit.runtime.patching import require_attribute
from megakit.training.validation import FromLastStage

_TrainingEpochLoop: Any = require_attribute(loops, "_TrainingEpochLoop")
#: Sets the name that `log` in a training step needs, and tells the profiler.
call_strategy = require_attribute(call, "_call_strategy_hook")
#: The state of the loop in a checkpoint.
COUNTERS = ("step", "epoch_start", "validated_step")


def use_step_loop(trainer: pl.Trainer) -> None:
    """Puts a `StepLoop` in the place of the trainer's own loop.

    Raises:
        UserError: The trainer accumulates gradients over batches.
    """
    if trainer.accumulate_grad_batches != 1:
        raise UserError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: Megatron accumulates the "
            "gradients of a step's micro batches. Use a larger global batch size instead."
        )
    if not isinstance(trainer.fit_loop.epoch_loop, StepLoop):
        trainer.fit_loop.epoch_loop = StepLoop(trainer.fit_loop.epoch_loop)


class StepLoop(_TrainingEpochLoop):
    """Runs the steps of an epoch; validates at the interval, and after the last step.

    Lightning's loop counts batches in eight counters, and NeMo reads several micro batches in each
    step, so after a resumption the counters disagree. This loop counts steps. Lightning also calls
    twenty hooks at each step, which takes a tenth of the step of a small model. This loop calls the
    overridden ones.

    At each logged step, `trainer.callback_metrics` has the step's values on all ranks, named
    `train_loss` and `train_<name>`.

    Attributes:
        step: Completed optimizer steps.
        epoch_start: The step at which the current epoch began.
        validated_step: The step of the last validation.
        fetch_seconds: Seconds that steps of this start waited for data.
    """

    def __init__(self, replaced: Any) -> None:
        self.__dict__.update(vars(replaced))  # the trainer, the limits, and the loop of validation
        self.step = self.epoch_start = self.validated_step = 0
        self.fetch_seconds = 0.0
        self._batches_per_step = 1
        self._from_last_stage = FromLastStage()

    # --- What Lightning asks the loop ---

    @property
    def global_step(self) -> int:
        """Completed optimizer steps."""
        return self.step

    @property
    def batch_idx(self) -> int:
        """Number of the last step in this epoch, from 0."""
        return self.step - self.epoch_start - 1

    @property
    def total_batch_idx(self) -> int:
        """Number of the last step, from 0."""
        return self.step - 1

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Returns the counters for a checkpoint."""
        return {name: getattr(self, name) for name in COUNTERS}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Restores the counters from a checkpoint."""
        for name in COUNTERS:
            setattr(self, name, int(state_dict.get(name, 0)))

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Restores the counters; a checkpoint of Lightning's own loop has only the step."""
        super().load_state_dict(state_dict, prefix)
        if "step" not in state_dict[f"{prefix}state_dict"]:
            self.step = self.validated_step = self._optimizer_steps.total.completed

    @property
    def _optimizer_steps(self) -> Any:
        """Lightning's counter of the optimizer's steps, which callbacks of NeMo read."""
        return self.automatic_optimization.optim_progress.optimizer.step

    def _num_ready_batches_reached(self) -> bool:
        read = (self.step - self.epoch_start) * self._batches_per_step
        return self.batch_progress.is_last_batch or read >= self.trainer.num_training_batches

    # --- Validation ---

    def validation_is_due(self) -> bool:
        """Tells whether a validation follows the last completed step."""
        trainer = self.trainer
        step = self.step - (self.epoch_start if trainer.check_val_every_n_epoch else 0)
        every = trainer.val_check_batch
        if isinstance(trainer.val_check_interval, float) and every != float("inf"):
            every = max(1, every // self._batches_per_step)  # Lightning counts micro batches
        is_due = step % every == 0 or self._is_training_done
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        return bool((is_due or stops) and self._should_check_val_epoch())

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return self.validation_is_due()

    @property
    def _is_validation_done(self) -> bool:
        """False if the checkpoint was saved before the validation of its step."""
        is_new = self.restarting and self.validated_step != self.step
        return not (is_new and self.validation_is_due())

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validates if that is due."""
        if self.validation_is_due():
            self.validated_step = self.step  # before, for a checkpoint at the end of validation
        super().on_advance_end(data_fetcher)
        self._batches_that_stepped = self.step

    # --- The steps ---

    def on_run_start(self, data_fetcher: Any) -> None:
        """Prepares the steps of an epoch, or of the rest of an epoch."""
        if not self.restarting:
            self.epoch_start = self.step
        self.val_loop.restarting = False
        super().on_run_start(data_fetcher)
        sampler = getattr(self.trainer.strategy, "data_sampler", None)
        self._batches_per_step = getattr(sampler, "num_microbatches", 1)
        data_fetcher.fetched += (self.step - self.epoch_start) * self._batches_per_step
        self._from_last_stage = FromLastStage()
        self._start_of_step = self._hooks("on_train_batch_start")
        self._end_of_step = self._hooks("on_train_batch_end")
        self._has_plain_schedulers = all(
            config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau
            for config in self.trainer.lr_scheduler_configs
        )

    def _hooks(self, name: str) -> list[Callable[..., Any]]:
        """Returns the methods of callbacks and module that override a hook."""
        trainer, module = self.trainer, self.trainer.lightning_module
        hooks: list[Callable[..., Any]] = [
            partial(getattr(callback, name), trainer, module)
            for callback in trainer.callbacks
            if is_overridden(name, callback, pl.Callback)
        ]
        own = [getattr(module, name)] if is_overridden(name, module, pl.LightningModule) else []
        return hooks + own

    def _call(self, name: str, hooks: list[Callable[..., Any]], *args: Any) -> Any:
        """Calls hooks, and returns what the last one returns; `log` needs the name of its hook."""
        module, result = self.trainer.lightning_module, None
        module._current_fx_name = name
        for hook in hooks:
            result = hook(*args)
        module._current_fx_name = None
        return result

    def advance(self, data_fetcher: Any) -> None:
        """Runs one step: the hooks before it, the step, the schedule of the rate, the hooks after.

        Raises:
            StopIteration: There are no more samples, or the module's hook returned -1.
        """
        if not self._is_validation_done:
            return  # `on_advance_end` validates
        trainer, index = self.trainer, self.step - self.epoch_start
        iterator = next(data_fetcher)  # NeMo: the step itself reads the batches
        connector = require_attribute(trainer, "_logger_connector")
        connector.on_batch_start(data_fetcher._batch)
        name, module = "on_train_batch_start", trainer.lightning_module
        result = self._call(name, self._start_of_step, data_fetcher._batch, index)
        if result == -1 and is_overridden(name, module, pl.LightningModule):
            raise StopIteration
        with trainer.profiler.profile("run_training_batch"):
            outputs = self._optimize(iterator, index)
        self.step += 1
        counter = self._optimizer_steps
        counter.total.completed = counter.current.completed = self.step
        self.batch_progress.is_last_batch = data_fetcher.done
        if self._has_plain_schedulers:
            for config in trainer.lr_scheduler_configs:
                module.lr_scheduler_step(config.scheduler, None)
        else:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        is_logged = self.is_logged()
        if is_logged:
            self.share(outputs)
        self._call("on_train_batch_end", self._end_of_step, outputs, data_fetcher._batch, index)
        if self._results:  # of `log` in a hook, or in the module
            connector.on_batch_end()
            if is_logged:
                connector.log_metrics(connector.metrics["log"], step=self.step)

    def _optimize(self, iterator: Iterator[Any], index: int) -> dict[str, Any]:
        """Makes an optimizer step; returns the values of the training step by name."""
        graph = getattr(self.trainer.strategy, "step_graph", None)
        if graph is None:
            return self._compute(index, iterator)
        outputs: dict[str, Any] = graph(iterator, partial(self._compute, index))
        return outputs

    def _compute(self, index: int, iterator: Iterator[Any]) -> dict[str, Any]:
        """Makes an optimizer step by Python."""
        trainer, strategy = self.trainer, self.trainer.strategy
        outputs: dict[str, Any] = {}

        def closure() -> Any:
            result = call_strategy(trainer, "training_step", iterator)
            outputs.update(result if isinstance(result, dict) else {"loss": result})
            return outputs["loss"]

        module = trainer.lightning_module
        module._current_fx_name = "optimizer_step"  # NeMo's strategy logs there
        if is_overridden("optimizer_step", module, pl.LightningModule):
            optimizer = require_attribute(strategy, "_lightning_optimizers")[0]
            module.optimizer_step(trainer.current_epoch, index, optimizer, closure)
        else:
            strategy.optimizer_step(strategy.optimizers[0], closure, module)
        module._current_fx_name = None
        return outputs

    def is_logged(self) -> bool:
        """Tells whether this step is logged: of the interval, the first, last or validated."""
        trainer, every = self.trainer, self.trainer.log_every_n_steps
        is_regular = self.step == 1 or (every > 0 and self.step % every == 0)
        is_last = trainer.should_stop or self._is_training_done
        return is_regular or is_last or self.validation_is_due()

    def share(self, outputs: dict[str, Any]) -> None:
        """Gives all pipeline stages the values of a step, which only the last stage has.

        The values leave a GPU together with the norms of the gradients, which are checked.
        """
        strategy = self.trainer.strategy
        values = self._from_last_stage(outputs, strategy.root_device)
        if hasattr(strategy, "read"):
            numbers = strategy.read([*values.values()])
            values = {n: torch.tensor(v) for n, v in zip(values, numbers, strict=True)}
        self.trainer.callback_metrics.update({f"train_{n}": v for n, v in values.items()})

    def _on_before_fetch(self) -> None:
        super()._on_before_fetch()
        self._fetch_began = time.perf_counter()

    def _on_after_fetch(self) -> None:
        self.fetch_seconds += time.perf_counter() - self._fetch_began
        super()._on_after_fetch()
