"""Builds NeMo's strategy and trainer for a run; trains with them."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl

from megakit.checkpoints.manifest import CHANGES, CODE, METRICS, read_manifest
from megakit.checkpoints.writer import CheckpointWriter
from megakit.errors import UserError
from megakit.job.layout import Layout
from megakit.job.script import Run
from megakit.reporting.metrics import MetricsFile
from megakit.reporting.tensorboard import TensorBoard
from megakit.runtime.accelerator import use_full_float32
from megakit.runtime.patching import patch, require_attribute
from megakit.runtime.saving import write_in_threads
from megakit.training.callbacks import (
    ExactSteps,
    ExactValidation,
    StopOnSignal,
    StopWithoutProgress,
)
from megakit.training.dropout import ExactDropout
from megakit.training.hooks import skip_empty_hooks
from megakit.training.optimizer import use_fused_adam
from megakit.training.progress import DataClock, Reporter
from megakit.training.strategy import ExactStrategy
from megakit.training.strategy_options import StrategyOptions, check_options
from megakit.training.validation import callbacks_of
from megakit.training.views import MakeView, Pictures


def build_strategy(layout: Layout, strategy: StrategyOptions | None = None) -> ExactStrategy:
    """Returns the strategy for a layout.

    Args:
        layout: The parallel sizes of the job.
        strategy: Options of the strategy.

    Raises:
        UserError: An option is unknown, or would have no effect.
    """
    options = strategy or {}
    check_options(options, layout)
    write_in_threads()
    use_fused_adam()
    built = ExactStrategy(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=options.get("sequence_parallel", False),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=options.get("use_distributed_optimizer", False),
            overlap_grad_reduce=options.get("overlap_grad_reduce", False),
            overlap_param_gather=options.get("overlap_param_gather", False),
        ),
        # Saves are short, and asynchronous saves would not be exact.
        ckpt_async_save=False,
        # The only format of the distributed optimizer that can be loaded again.
        ckpt_optim_fully_reshardable=True,
        replace_progress_bar=False,
    )
    built.use_distributed_optimizer = options.get("use_distributed_optimizer")
    return built


def build_trainer(
    run: Run,
    *,
    strategy: StrategyOptions | None = None,
    make_view: MakeView | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> nl.Trainer:
    """Returns a trainer for a run's layout, precision and length, with callbacks and logger.

    Args:
        run: The run's options, plan and directory.
        strategy: Options of the strategy, such as `{"sequence_parallel": True}`.
        make_view: Converts a validation batch and the model's output to what TensorBoard shows.
        callbacks: Further Lightning callbacks. Lightning calls them before our callbacks report and
            save.

    Raises:
        UserError: An option of the strategy is unknown, or would have no effect.
    """
    options, layout = run.options, run.layout
    skip_empty_hooks()
    if run.precision == "32":
        use_full_float32()
    built = build_strategy(layout, strategy)
    built.parallel_devices = _devices(run)
    built.timeout = options.timeout
    common: dict[str, Any] = {
        "accelerator": run.accelerator.name,
        "devices": "auto",  # the strategy names them: Lightning refuses GPUs it cannot see
        "num_nodes": layout.num_nodes,
        "strategy": built,
        "plugins": nl.MegatronMixedPrecision(precision=run.precision),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    if not run.trains:
        return nl.Trainer(**common, logger=False, enable_checkpointing=False)
    resumed_step, max_steps = run.resumed_step, options.max_steps
    if run.resume and read_manifest(Path(run.resume)).final:
        max_steps = resumed_step  # the run ended early; only its summary is missing
    path = run.path / METRICS
    # `purge_step` hides the values that an earlier start logged after the resumed step.
    logger = TensorBoardLogger(
        run.path,
        name="",
        version="tensorboard",
        default_hp_metric=False,
        purge_step=resumed_step + 1,
    )
    metrics_file = tensorboard = None
    if run.is_main:
        saved = Path(run.resume, METRICS) if run.resume else None
        metrics_file = MetricsFile(path, resumed_step, saved, run.check_directory)
        tensorboard = TensorBoard(logger, run.stage.name, resumed_step)
        tensorboard.add_hyperparameters(_hyperparameters(run))
    writer = CheckpointWriter(
        run.directory.checkpoints,
        run.manifest(),
        options.save_interval,
        run.best_by,
        copied=[path],
        check_place=run.check_directory,
    )
    # Lightning calls each callback several times a step, so an unneeded callback is left out.
    needs_values = run.best_by not in ("val_loss", "last")
    stop = []
    if needs_values or options.stop_after is not None:
        stop = [StopWithoutProgress(writer, options.stop_after)]
    return nl.Trainer(
        **common,
        max_steps=max_steps,
        # One validation step before training checks that --best-by names a validated value.
        num_sanity_val_steps=int(needs_values),
        val_check_interval=options.val_interval,
        # The interval counts steps, not epochs: the whole training is one epoch.
        check_val_every_n_epoch=None,
        # An integer counts global batches: see `MegatronDataModule.reconfigure_limit_batches`.
        limit_val_batches=options.limit_val_batches or 1.0,
        # Lightning logs nothing: `Reporter` writes the values to TensorBoard.
        log_every_n_steps=options.max_steps + 1,
        logger=logger,
        profiler=DataClock(),
        callbacks=[
            ExactValidation(),
            *callbacks,
            *stop,  # before `Pictures`, which draws more after the last validation
            *([Pictures(make_view, tensorboard)] if make_view is not None else []),
            Reporter(run.console, run.stage.name, writer, metrics_file, tensorboard),
            StopOnSignal(writer),
            writer,
        ],
    )


def _devices(run: Run) -> list[torch.device]:
    """Returns the device of each rank of this machine, as this rank numbers the devices.

    A rank sees either all GPUs of the job or, for example with Slurm's `--gpus-per-task=1`, only
    its own GPU, which is then `cuda:0`.

    Raises:
        UserError: This machine, which may be another one than rank 0's, has fewer GPUs than ranks.
    """
    ranks = range(run.layout.devices)
    if run.accelerator.name == "cpu":
        return [torch.device("cpu") for _ in ranks]
    count = torch.cuda.device_count()
    if count == 0 or 1 < count < len(ranks):
        raise UserError(
            f"{socket.gethostname()} has {count} GPUs for {len(ranks)} processes, and each process "
            "needs its own. Request as many GPUs as processes on each machine."
        )
    return [torch.device("cuda", rank % count) for rank in ranks]


def _hyperparameters(run: Run) -> dict[str, Any]:
    """Returns the settings of a run by which a user compares runs."""
    layout, left_out = run.layout, ("start", CODE, CHANGES)
    return {
        "stage": run.stage.name,
        **{name: value for name, value in run.plan.identity.items() if name not in left_out},
        "micro_batch_size": layout.micro_batch_size,
        "tensor_parallel": layout.tensor,
        "pipeline_parallel": layout.pipeline,
        "data_parallel": layout.data,
    }


def train(
    *,
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    log: nl.NeMoLogger | None = None,
    resume: nl.AutoResume | None = None,
) -> None:
    """Trains a model like `nemo.collections.llm.train`, which needs more packages.

    Checkpoints are saved synchronously and in this process, whatever the strategy's
    `ckpt_async_save`. NeMo's asynchronous saves start processes that import the main script again,
    so a script without `if __name__ == "__main__":` would train again in each of them. A resumed
    training counts and validates like an uninterrupted one (`ExactSteps`), and draws the same
    random numbers for dropout (`ExactDropout`).

    Args:
        model: A Lightning module for NeMo's strategies.
        data: The Lightning data module.
        trainer: The `nemo.lightning.Trainer`.
        log: A NeMoLogger, or None.
        resume: An AutoResume that finds the checkpoint to resume from, or None.

    Raises:
        TypeError: The model or the data module is one of the package `pytorch_lightning`.
    """
    _check_lightning(model, data)
    _save_in_this_process(trainer)
    for callback in (ExactSteps, ExactDropout):
        if not callbacks_of(trainer, callback):
            require_attribute(trainer, "callbacks").insert(0, callback())
    if log is not None:
        log.setup(trainer, resume_if_exists=getattr(resume, "resume_if_exists", False))
    if resume is not None:
        resume.setup(trainer, model)
    trainer.fit(model, datamodule=data)


def _check_lightning(model: object, data: object) -> None:
    for value, cls in ((model, pl.LightningModule), (data, pl.LightningDataModule)):
        if not isinstance(value, cls):
            raise TypeError(
                f"{type(value).__name__} is no {cls.__name__} of lightning.pytorch, which NeMo "
                "uses. Replace `import pytorch_lightning as pl` by `import lightning.pytorch as "
                "pl` in every file."
            )


def _save_in_this_process(trainer: pl.Trainer) -> None:
    """Makes NeMo's strategy save synchronously, without helper processes.

    A distributed optimizer in NeMo's default format would resume in some layouts only.
    """
    if isinstance(trainer.strategy, nl.MegatronStrategy):
        write_in_threads()
        use_fused_adam()
        patch(trainer.strategy, "async_save", False)
        patch(trainer.strategy, "ckpt_optim_fully_reshardable", True)
