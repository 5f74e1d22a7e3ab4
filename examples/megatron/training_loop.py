"""Trains a model step by step: validates, logs, saves, stops at a signal, and resumes.

Every rank runs this loop. `run` has the checked options of the command line and the places of the
run's files. megakit adds what Megatron-Core leaves to its user: batches that do not depend on the
layout, complete checkpoints, signals, and the files that a run writes. Before a script's work,
`run_script` also patches Megatron: see `python -m megakit.runtime`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed
from torch.utils.tensorboard import SummaryWriter

from examples.megatron.model_components import Parts, micro_batches
from megakit.checkpoints.manifest import WEIGHTS
from megakit.errors import USE_ANOTHER, Stopped, reading
from megakit.job import Run
from megakit.job.finish import finish_training
from megakit.models.partial_loading import PREFIX, check_finite
from megakit.runtime.accelerator import own_gpu
from megakit.training.best_value import BestValue
from megakit.training.clock import Clock
from megakit.training.first_look import say_size_and_warnings
from megakit.training.gathering import means_on_all_ranks
from megakit.training.metrics_csv import Metrics
from megakit.training.step_seeds import seed_generators
from megakit.training.stopping import StopSignals, check_norm

LOG_INTERVAL = 10
#: The format of a distributed optimizer's states that every layout can load.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,  # gathered on the hosts, not on GPUs
}


def start_process_groups(run: Run) -> None:
    """Joins the other ranks of the job, and divides all ranks into Megatron's groups."""
    torch.cuda.set_device(own_gpu())  # without effect on a CPU, as all of torch.cuda
    alone: Any = {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    rendezvous = {} if run.layout.world_size > 1 else alone  # else torchrun's variables
    distributed.init_process_group("nccl", timeout=run.timeout, **rendezvous)  # on a CPU, gloo
    minutes: Any = run.timeout.total_seconds() / 60
    parallel_state.initialize_model_parallel(
        run.layout.tensor, run.layout.pipeline, distributed_timeout_minutes=minutes
    )
    tensor_parallel.model_parallel_cuda_manual_seed(getattr(run.options, "seed", 0))


@dataclass
class Training:
    """One training, from its first step or from a checkpoint.

    Attributes:
        run: The run.
        parts: Model, optimizer and scheduler of this rank.
        forward_step: Computes one micro batch, for Megatron's schedule.
        train_set: The training samples of all epochs.
        val_set: The validation samples.
        settings: What later scripts need to build the model again.
        better: `min` or `max` for each value that the loss reports: which one is the best.
    """

    run: Run
    parts: Parts
    forward_step: Callable[..., tuple[Tensor, Any]]
    train_set: Any
    val_set: Any
    settings: dict[str, Any]
    better: Mapping[str, Callable[..., float]]

    def __post_init__(self) -> None:
        run = self.run
        self.best = BestValue(run.best_by, run.options.stop_after, self.better)
        self.clock, self.store = Clock(run.began), run.store()
        self.store.best_is_highest = self.best.choose is max
        self.step, module = run.resumed_step, self.parts.model.module
        self.name = type(getattr(module, "module", module)).__name__  # inside Float16Module
        #: What a checkpoint contains beside the weights and the optimizer.
        self.stateful = {"scheduler": self.parts.scheduler, "clock": self.clock, "best": self.best}

    def run_to_the_end(self, next_verb: str | None = None) -> Path:
        """Trains; returns the path of the best checkpoint.

        Raises:
            Stopped: A signal has stopped the training, after a checkpoint.
        """
        run, options = self.run, self.run.options
        run.begin()
        self.store.open()
        if run.resume:
            self.load(Path(run.resume))
        self.open_logs()
        consumed = self.step * run.layout.global_batch_size
        loader = micro_batches(run, self.train_set, consumed=consumed)
        batches = self.clock.measure_each(loader)
        with StopSignals(run.console.say) as signals:
            while self.step < run.max_steps and not self.best.should_stop():
                if number := signals.received(self.step):
                    self.save({})  # no values: a signal must not decide which checkpoint is best
                    raise Stopped(number, self.step)
                with self.clock.measure("training"):
                    lr, norm, reports = self.train_step(batches)
                is_last, is_better = self.step == run.max_steps, False
                values: dict[str, float] = {}
                validates = is_last or self.step % options.val_interval == 0
                if validates:
                    with self.clock.measure("validation"):
                        values = self.validate()
                    is_better = self.best.is_better(values)
                    signals.agree_at = self.step  # now, as the ranks have just waited
                if validates or self.step == 1 or self.step % LOG_INTERVAL == 0:
                    self.log(lr, norm, means_on_all_ranks("train_", reports) | values)
                stops = self.best.should_stop()
                saves_better = is_better and options.stop_after is not None
                if is_last or stops or saves_better or self.step % options.save_interval == 0:
                    self.save(values, final=stops and not is_last)
        done = self.clock.trained(self.step, self.store.best, self.store.last)
        return finish_training(run, done, next_verb)

    def train_step(self, batches: Iterator[Any]) -> tuple[float, float, list[dict[str, Tensor]]]:
        """Makes an optimizer step; returns learning rate, norm of the gradient, and reports."""
        model, optimizer, scheduler = self.parts
        seed_generators(self.run.options.seed, self.step)  # equal dropout after a resumption
        lr = optimizer.param_groups[0]["lr"]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = self.run_schedule(batches, forward_only=False)
        _, norm, _ = optimizer.step()
        scheduler.step(increment=1)
        self.step += 1
        check_norm(self.step, norm)
        return lr, float(norm), reports

    def run_schedule(self, batches: Iterator[Any], *, forward_only: bool) -> Any:
        """Runs the micro batches of a step; returns their reports on the last pipeline stage."""
        return get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=batches,
            model=[self.parts.model],
            num_microbatches=self.run.layout.num_micro_batches,
            seq_length=1,  # of what pipeline stages exchange: (sequence, samples, hidden)
            micro_batch_size=self.run.layout.micro_batch_size,
            forward_only=forward_only,
        )

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Returns the means over the validation set, in which each sample counts once."""
        run, reports = self.run, []
        loader = micro_batches(run, self.val_set, pad=True, limit=run.options.limit_val_batches)
        batches = iter(loader)
        self.parts.model.eval()
        for _ in range(len(loader) // run.layout.num_micro_batches):
            reports += self.run_schedule(batches, forward_only=True)
        self.parts.model.train()
        return means_on_all_ranks("val_", reports)

    # --- Log ---

    def open_logs(self) -> None:
        """Prints the size of the training; opens metrics.csv and TensorBoard's file on rank 0."""
        run, size = self.run, self.run.layout.global_batch_size
        dataset = None if run.options.num_workers else self.train_set
        say_size_and_warnings(run.console, self.parts.model, dataset, run.max_steps, size)
        self.progress = run.console.progress(run.stage.name, run.max_steps, self.step)
        self.table = run.metrics_file()
        folder = str(run.path / "tensorboard")
        self.curves = SummaryWriter(folder, purge_step=self.step + 1) if run.is_main else None

    def log(self, lr: float, norm: float, values: dict[str, float]) -> None:
        """Writes a row of metrics.csv and TensorBoard's curves; shows the progress."""
        losses = {name: values.get(name) for name in ("train_loss", "val_loss")}
        rest = {name: value for name, value in values.items() if name not in losses}
        self.progress.update(self.step, {**losses, **rest})
        if self.table and self.curves:
            consumed = self.step * self.run.layout.global_batch_size
            self.table.append(
                Metrics(self.step, consumed, **losses, lr=lr, grad_norm=norm, values=rest)
            )
            for name, value in {**values, "lr": lr, "grad_norm": norm}.items():
                self.curves.add_scalar(f"{self.run.stage.name}/{name}", value, self.step)

    # --- Checkpoints ---

    def state(self, is_loading: bool = False) -> dict[str, Any]:
        """Describes which part of each tensor this rank has, for a checkpoint of any layout."""
        model, optimizer, _ = self.parts
        weights = model.module.sharded_state_dict(prefix=PREFIX)
        moments = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA)
        states = {name: part.state_dict() for name, part in self.stateful.items()}
        return {**weights, "optimizer": moments, **states}

    def save(self, values: Mapping[str, float], final: bool = False) -> None:
        """Saves a checkpoint with the values of its validation."""

        def write(folder: Path) -> None:
            (folder / WEIGHTS).mkdir(exist_ok=True)
            dist_checkpointing.save(
                self.state(),
                str(folder / WEIGHTS),
                # Megatron compares the rest between the ranks; each has its own clock.
                preprocess_common_before_consistancy_check=lambda rest: {**rest, "clock": None},
                content_metadata=METADATA,
            )

        if self.curves:
            self.curves.flush()  # a resumed run logs the steps after this one
        with self.clock.measure("checkpoints"):
            self.store.save(
                self.step, write, values, model=self.name, settings=self.settings, final=final
            )

    def load(self, checkpoint: Path) -> None:
        """Restores the training from a checkpoint."""
        model, optimizer, _ = self.parts
        with reading(checkpoint, USE_ANOTHER):
            state = dist_checkpointing.load(self.state(is_loading=True), str(checkpoint / WEIGHTS))
            check_finite(state)
        weights = {name: state[name] for name in state if name.startswith(PREFIX)}
        model.module.load_state_dict({n.removeprefix(PREFIX): weights[n] for n in weights})
        for name, part in {"optimizer": optimizer, **self.stateful}.items():
            part.load_state_dict(state[name])
