"""Trains a model step by step: validates, logs, saves, stops at a signal, and resumes.

Every rank runs this loop. `run` has the checked options of the command line and the places of the
run's files. megakit adds what Megatron-Core leaves to its user: batches that do not depend on the
layout, complete checkpoints, signals, and the files that a run writes.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from examples.megatron.model_components import Parts
from megakit.checkpoints.manifest import WEIGHTS
from megakit.data import GlobalBatchSampler
from megakit.data.loader import make_loader
from megakit.errors import USE_ANOTHER, Stopped, reading
from megakit.job import Run
from megakit.job.finish import finish_training
from megakit.models.partial_loading import PREFIX, check_finite
from megakit.training.best_value import BestValue
from megakit.training.clock import Clock
from megakit.training.first_look import look
from megakit.training.gathering import from_last_stage
from megakit.training.metrics_csv import Metrics
from megakit.training.step_seeds import seed_generators
from megakit.training.stopping import StopSignals

LOG_INTERVAL = 10
#: Saves Adam's states so that a training with the distributed optimizer resumes in any layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
#: Megatron's schedule calls it with micro batches and the model.
ForwardStep = Callable[[Any, torch.nn.Module], tuple[Tensor, Any]]


def start_process_groups(run: Run) -> None:
    """Joins the other ranks of the job, and divides all ranks into Megatron's groups."""
    if run.accelerator.name == "gpu":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    alone: Any = {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    others = {} if run.layout.world_size > 1 else alone
    distributed.init_process_group("nccl", timeout=run.timeout, **others)  # gloo on CPUs
    minutes: Any = run.timeout.total_seconds() / 60
    parallel_state.initialize_model_parallel(
        run.layout.tensor, run.layout.pipeline, distributed_timeout_minutes=minutes
    )
    tensor_parallel.model_parallel_cuda_manual_seed(getattr(run.options, "seed", 0))


def micro_batches(
    run: Run, dataset: Any, *, consumed: int = 0, pads: bool = False, limit: int | None = None
) -> Iterator[Any]:
    """Yields this rank's micro batches of a dataset, in the order of the samples' indices.

    Args:
        run: The run.
        dataset: The samples.
        consumed: The number of samples that earlier steps have read.
        pads: Whether to fill the last global batch, instead of dropping it. Each batch then has a
            `loss_mask`: 0 for padding, and on average 1, so that a mean over all micro batches and
            ranks is the mean over the samples.
        limit: The largest number of global batches; None: all.
    """
    layout, num_samples = run.layout, len(dataset)
    if limit is not None:
        num_samples = min(num_samples, limit * layout.global_batch_size)
    sampler = GlobalBatchSampler(
        num_samples,
        layout.micro_batch_size,
        layout.global_batch_size,
        rank=parallel_state.get_data_parallel_rank(),
        num_ranks=layout.data,
        start=lambda: consumed,
        pad=pads,
    )
    weight = len(sampler) * layout.micro_batch_size * layout.data / num_samples if pads else None
    template = DataLoader(dataset, num_workers=run.options.num_workers)
    return iter(make_loader(template, sampler, weight, torch.device(torch.cuda.current_device())))


class Training:
    """One training, from its first step or from a checkpoint.

    Args:
        run: The run.
        parts: Model, optimizer and scheduler of this rank.
        forward_step: Computes one micro batch.
        train_set: The training samples of all epochs.
        val_set: The validation samples.
        settings: What later scripts need to build the model again.
        choose: `min` or `max` for each value that the loss reports: which one is the best.
    """

    def __init__(
        self,
        run: Run,
        parts: Parts,
        forward_step: ForwardStep,
        train_set: Any,
        val_set: Any,
        *,
        settings: Mapping[str, Any],
        choose: Mapping[str, Callable[..., float]],
    ) -> None:
        self.run, self.parts, self.forward_step = run, parts, forward_step
        self.train_set, self.val_set, self.settings = train_set, val_set, dict(settings)
        self.best = BestValue(run.best_by, run.options.stop_after, choose)
        self.clock, self.store = Clock(run.began), run.store()
        self.store.best_is_highest = self.best.choose is max
        self.step, module = run.resumed_step, parts.model.module
        self.name = type(getattr(module, "module", module)).__name__  # inside Float16Module
        self.num_micro_batches = run.layout.global_batch_size // (
            run.layout.micro_batch_size * run.layout.data
        )

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
        batches = self.clock.measure_each(micro_batches(run, self.train_set, consumed=consumed))
        with StopSignals(run.console.say) as signals:
            while self.step < run.max_steps and not self.best.should_stop():
                if number := signals.received(self.step):
                    self.save({})
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
                    signals.agree_at = self.step  # the ranks have waited for each other anyway
                if validates or self.step == 1 or self.step % LOG_INTERVAL == 0:
                    self.log(lr, norm, mean_reports(reports, "train_") | values)
                stops = self.best.should_stop()
                is_wanted = is_better and options.stop_after is not None
                if is_last or stops or is_wanted or self.step % options.save_interval == 0:
                    self.save(values, final=stops and not is_last)
        done = self.clock.trained(self.step, self.store.best, self.store.last)
        return finish_training(run, done, next_verb)

    def train_step(self, batches: Iterator[Any]) -> tuple[float, float, list[dict[str, Tensor]]]:
        """Makes an optimizer step; returns learning rate, norm of the gradient, and reports."""
        model, optimizer, scheduler = self.parts
        seed_generators(self.run.options.seed, self.step)  # of dropout, after a resumption, too
        lr = optimizer.param_groups[0]["lr"]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = self.run_schedule(batches, forward_only=False)
        _, norm, _ = optimizer.step()
        scheduler.step(increment=1)
        self.step += 1
        if not math.isfinite(norm):
            raise RuntimeError(
                f"Step {self.step}: the gradient's norm is {norm}. Earlier checkpoints are not "
                "changed. Check the loss and the data for NaN, or use a lower --lr."
            )
        return lr, float(norm), reports

    def run_schedule(self, batches: Iterator[Any], *, forward_only: bool) -> Any:
        """Runs the micro batches of a step; returns their reports on the last pipeline stage."""
        return get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=batches,
            model=[self.parts.model],
            num_microbatches=self.num_micro_batches,
            seq_length=1,
            micro_batch_size=self.run.layout.micro_batch_size,
            forward_only=forward_only,
        )

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Returns the means over the validation set, in which each sample counts once."""
        limit, reports = self.run.options.limit_val_batches, []
        steps = -(-len(self.val_set) // self.run.layout.global_batch_size)
        batches = micro_batches(self.run, self.val_set, pads=True, limit=limit)
        self.parts.model.eval()
        for _ in range(min(steps, limit or steps)):
            reports += self.run_schedule(batches, forward_only=True)
        self.parts.model.train()
        return mean_reports(reports, "val_")

    # --- Log ---

    def open_logs(self) -> None:
        """Prints the size of the training; opens metrics.csv and TensorBoard's file on rank 0."""
        run, size = self.run, self.run.layout.global_batch_size
        dataset = None if run.options.num_workers else self.train_set
        look(run.console, self.parts.model, dataset, run.max_steps, size)
        self.progress = run.console.progress(run.stage.name, run.max_steps, self.step)
        self.table = run.metrics_file()
        folder = str(run.path / "tensorboard")
        self.curves = SummaryWriter(folder, purge_step=self.step + 1) if run.is_main else None

    def log(self, lr: float, norm: float, values: dict[str, float]) -> None:
        """Writes a row of metrics.csv and TensorBoard's curves; shows the progress."""
        columns = {"train_loss": values.pop("train_loss"), "val_loss": values.pop("val_loss", None)}
        columns |= {"lr": lr, "grad_norm": norm}
        consumed = self.step * self.run.layout.global_batch_size
        shown = {"loss": columns["train_loss"], "validation": columns["val_loss"], **values}
        self.progress.update(self.step, shown)
        if self.table and self.curves:
            self.table.append(Metrics(self.step, consumed, **columns, values=values))
            for name, value in (columns | values).items():
                if value is not None:
                    self.curves.add_scalar(f"{self.run.stage.name}/{name}", value, self.step)

    # --- Checkpoints ---

    def state(self, is_loading: bool = False) -> dict[str, Any]:
        """Describes which part of each tensor this rank has, for a checkpoint of any layout."""
        model, optimizer, scheduler = self.parts
        weights = model.module.sharded_state_dict(prefix=PREFIX)
        moments = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA)
        rest = {"scheduler": scheduler, "clock": self.clock, "best": self.best}
        states = {name: part.state_dict() for name, part in rest.items()}
        return {**weights, "optimizer": moments, **states}

    def save(self, values: Mapping[str, float], final: bool = False) -> None:
        """Saves a checkpoint with the values of its validation."""

        def write(folder: Path) -> None:
            (folder / WEIGHTS).mkdir(exist_ok=True)
            dist_checkpointing.save(self.state(), str(folder / WEIGHTS))

        if self.curves:
            self.curves.flush()  # a resumed run does not log these steps again
        with self.clock.measure("checkpoints"):
            self.store.save(
                self.step, write, values, model=self.name, settings=self.settings, final=final
            )

    def load(self, checkpoint: Path) -> None:
        """Restores the training from a checkpoint."""
        model, optimizer, scheduler = self.parts
        with reading(checkpoint, USE_ANOTHER):
            state = dist_checkpointing.load(self.state(is_loading=True), str(checkpoint / WEIGHTS))
            check_finite(state)
        weights = {name: state[name] for name in state if name.startswith(PREFIX)}
        model.module.load_state_dict({n.removeprefix(PREFIX): weights[n] for n in weights})
        rest = {"optimizer": optimizer, "scheduler": scheduler}
        for name, part in {**rest, "clock": self.clock, "best": self.best}.items():
            part.load_state_dict(state[name])


def mean_reports(reports: list[dict[str, Tensor]], prefix: str) -> dict[str, float]:
    """Returns the means over micro batches and data-parallel ranks, on all pipeline stages."""
    found: dict[str, float] = {}
    if reports:  # on the last stage
        rows = torch.stack([torch.stack([*report.values()]) for report in reports])
        means = rows.double().mean(dim=0)
        distributed.all_reduce(means, group=parallel_state.get_data_parallel_group())
        means /= parallel_state.get_data_parallel_world_size()
        found = dict(zip(reports[0], means.tolist(), strict=True))
    return {f"{prefix}{name}": value for name, value in from_last_stage(found).items()}
