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
from megatron.core import parallel_state

from megakit.errors import UserError
from megakit.nemo.validation import named
from megakit.runtime.fused_adam import patch_optimizers
from megakit.runtime.patching import require_attribute
from megakit.runtime.writer_threads import write_in_threads
from megakit.training.gathering import from_last_stage

_TrainingEpochLoop: Any = require_attribute(loops, "_TrainingEpochLoop")
#: Sets the name that `log` in a training step needs, and tells the profiler.
call_strategy = require_attribute(call, "_call_strategy_hook")
#: The state of the loop in a checkpoint.
COUNTERS = ("step", "epoch_start", "validated_step")


def use_step_loop(trainer: pl.Trainer) -> None:
    """Puts a `StepLoop` in the place of the trainer's own loop, and corrects optimizers and saves.

    Raises:
        UserError: The trainer accumulates or clips gradients, which Megatron does.
    """
    if trainer.accumulate_grad_batches != 1 or trainer.gradient_clip_val:
        raise UserError(
            "Megatron accumulates the gradients of a step's micro batches, and clips them. Leave "
            "accumulate_grad_batches and gradient_clip_val out of the trainer. Use a larger global "
            "batch size, and clip_grad of the optimizer."
        )
    patch_optimizers()
    write_in_threads()
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
        """Restores the counters from a checkpoint.

        Raises:
            UserError: Another loop wrote the checkpoint, which counts otherwise.
        """
        if not state_dict.keys() >= {*COUNTERS}:
            raise UserError(
                "The checkpoint to resume from was written by the loop of NeMo or Lightning, whose "
                "counters `megakit.training.train` cannot continue. Begin a new run with its "
                "weights: name it as initial_ckpt_path of the model's config. Or resume with "
                "NeMo's own `llm.train`."
            )
        for name in COUNTERS:
            setattr(self, name, int(state_dict[name]))

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

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validates if that is due."""
        is_due = self.validation_is_due()
        if is_due:
            self.validated_step = self.step  # before, for a checkpoint at the end of validation
        if is_due or self.trainer.received_sigterm:
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
        self._start_of_step = self.hooks("on_train_batch_start")
        self._before_optimizer_step = self.hooks("on_before_optimizer_step")
        self._end_of_step = self.hooks("on_train_batch_end")
        if self.restarting and self.validated_step != self.step:
            self.on_advance_end(data_fetcher)  # the checkpoint was saved before the validation
        self._restarting = False

    def hooks(self, name: str) -> list[Callable[..., Any]]:
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
        if not hooks:
            return None
        module, result = self.trainer.lightning_module, None
        before, module._current_fx_name = module._current_fx_name, name
        for hook in hooks:
            result = hook(*args)
        module._current_fx_name = before
        return result

    def before_optimizer_step(self, optimizer: Any) -> None:
        """Calls the hooks that see the gradients; Lightning's precision plugin would do it."""
        self._call("on_before_optimizer_step", self._before_optimizer_step, optimizer)

    def advance(self, data_fetcher: Any) -> None:
        """Runs one step: the hooks before it, the step, the schedule of the rate, the hooks after.

        Raises:
            StopIteration: There are no more samples, or the module's hook returned -1.
        """
        trainer, index = self.trainer, self.step - self.epoch_start
        iterator = next(data_fetcher)  # NeMo: the step itself reads the batches
        connector = require_attribute(trainer, "_logger_connector")
        connector.on_batch_start(data_fetcher._batch)
        result = self._call("on_train_batch_start", self._start_of_step, data_fetcher._batch, index)
        if result == -1:
            raise StopIteration
        graph, compute = (
            getattr(trainer.strategy, "step_graph", None),
            partial(self._compute, index),
        )
        with trainer.profiler.profile("run_training_batch"):
            outputs = compute(iterator) if graph is None else graph(iterator, compute)
        self.step += 1
        # Lightning's counter of the optimizer's steps, which callbacks of NeMo read.
        counter = self.automatic_optimization.optim_progress.optimizer.step
        counter.total.completed = counter.current.completed = self.step
        self.batch_progress.is_last_batch = data_fetcher.done
        for config in trainer.lr_scheduler_configs:
            is_due = config.interval == "step" and (index + 1) % config.frequency == 0
            if is_due and not config.reduce_on_plateau:
                trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
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

    def _compute(self, index: int, iterator: Iterator[Any]) -> dict[str, Any]:
        """Makes an optimizer step by Python; returns the values of the training step by name."""
        trainer = self.trainer
        outputs: dict[str, Any] = {}

        def closure() -> Any:
            outputs.update(named(call_strategy(trainer, "training_step", iterator)))
            return outputs["loss"]

        optimizer = require_attribute(trainer.strategy, "_lightning_optimizers")[0]
        step = trainer.lightning_module.optimizer_step
        self._call("optimizer_step", [step], trainer.current_epoch, index, optimizer, closure)
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
        own = outputs if parallel_state.is_pipeline_last_stage() else {}
        read = getattr(strategy, "read", lambda values: [float(value) for value in values])
        values = from_last_stage(dict(zip(own, read([*own.values()]), strict=True)))
        logged = {f"train_{name}": torch.tensor(value) for name, value in values.items()}
        self.trainer.callback_metrics.update(logged)

    def _on_before_fetch(self) -> None:
        super()._on_before_fetch()
        self._fetch_began = time.perf_counter()

    def _on_after_fetch(self) -> None:
        self.fetch_seconds += time.perf_counter() - self._fetch_began
        super()._on_after_fetch()
