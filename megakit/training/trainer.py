"""NeMo's strategy and trainer, set up for one of our runs, and the two things to do with them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl

from megakit.checkpoints.folders import METRICS
from megakit.checkpoints.manifest import CHANGES, CODE, read_manifest
from megakit.checkpoints.writer import CheckpointWriter
from megakit.errors import UserError
from megakit.job.launch import end_with_torchrun
from megakit.job.layout import Layout
from megakit.job.script import Run
from megakit.reporting.metrics import MetricsFile
from megakit.reporting.tensorboard import TensorBoard
from megakit.runtime.saving import write_within_this_process
from megakit.training.callbacks import ExactSteps, StopOnSignal, StopWithoutProgress
from megakit.training.progress import DataClock, Reporter
from megakit.training.strategy import ExactStrategy
from megakit.training.views import MakeView, Pictures


def build_strategy(layout: Layout, use_distributed_optimizer: bool = False) -> ExactStrategy:
    """The strategy for a layout.

    Args:
        layout: Sizes of the job.
        use_distributed_optimizer: Whether data-parallel ranks share the optimizer's state; the
            optimizer module has to say the same.
    """
    write_within_this_process()
    return ExactStrategy(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=use_distributed_optimizer,
        ),
        # Saves are short, and a writer in the background would not be exact.
        ckpt_async_save=False,
        # Of the distributed optimizer's formats, the one that can be read back.
        ckpt_optim_fully_reshardable=use_distributed_optimizer,
        replace_progress_bar=False,
    )


def build_trainer(
    run: Run,
    *,
    use_distributed_optimizer: bool = False,
    view: MakeView | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> nl.Trainer:
    """A trainer for this run's layout, precision and length, with what our runs leave behind.

    Args:
        run: What is to be done, and where.
        use_distributed_optimizer: See `build_strategy`.
        view: Says what TensorBoard can show of a validation batch and the model's output.
        callbacks: Further callbacks of Lightning; Lightning calls them before ours report and save.
    """
    options, layout = run.options, run.layout
    end_with_torchrun(run.console)
    # NeMo takes the time-out of its process groups from here.
    os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(options.timeout)
    common: dict[str, Any] = {
        "accelerator": run.accelerator.name,
        "devices": layout.devices,
        "num_nodes": layout.num_nodes,
        "strategy": build_strategy(layout, use_distributed_optimizer),
        "plugins": nl.MegatronMixedPrecision(precision=options.precision),
        # One validation step before training finds out whether --best-by names a validated value.
        "num_sanity_val_steps": int(run.trains and run.best_by not in ("val_loss", "last")),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    if not run.trains:
        return nl.Trainer(**common, logger=False, enable_checkpointing=False)
    resumed_step, max_steps = run.resumed_step, options.max_steps
    if run.plan.resume and read_manifest(Path(run.plan.resume)).final:
        max_steps = resumed_step  # the run ended early, and only its summary is missing
    path = run.path / METRICS
    metrics = None
    if run.is_main:
        saved = Path(run.plan.resume, METRICS) if run.plan.resume else None
        metrics = MetricsFile(path, resumed_step, saved, run.check_directory)
    writer = CheckpointWriter(
        run.directory.checkpoints,
        run.manifest(),
        options.save_interval,
        run.best_by,
        copied=[path],
        check_place=run.check_directory,
    )
    # Lightning calls each callback several times a step, so there is none without a need.
    is_default = options.stop_after is None and run.best_by in ("val_loss", "last")
    stop = [] if is_default else [StopWithoutProgress(writer, options.stop_after)]
    # What an earlier start logged beyond the step that it goes on from is hidden.
    logger = TensorBoardLogger(
        run.path,
        name="",
        version="tensorboard",
        default_hp_metric=False,
        purge_step=resumed_step + 1,
    )
    board = TensorBoard(logger, run.stage.name, resumed_step) if run.is_main else None
    if board is not None:
        board.add_hyperparameters(_hyperparameters(run))
    return nl.Trainer(
        **common,
        max_steps=max_steps,
        val_check_interval=options.val_interval,
        # Steps, not epochs, count: the training set is as long as the training.
        check_val_every_n_epoch=None,
        # A whole number counts global batches: see `MegatronDataModule.reconfigure_limit_batches`.
        limit_val_batches=options.limit_val_batches or 1.0,
        # Values go to TensorBoard by `Reporter`.
        log_every_n_steps=options.max_steps + 1,
        logger=logger,
        profiler=DataClock(),
        callbacks=[
            ExactSteps(),
            *callbacks,
            *([Pictures(view, board)] if view is not None else []),
            Reporter(run.console, run.stage.name, writer, metrics, board),
            *stop,
            StopOnSignal(writer),
            writer,
        ],
    )


def _hyperparameters(run: Run) -> dict[str, Any]:
    """What a run was asked for, as far as a person would compare runs by it."""
    layout, left_out = run.layout, ("start", CODE, CHANGES)
    return {
        "stage": run.stage.name,
        **{name: value for name, value in run.plan.identity.items() if name not in left_out},
        "micro_batch_size": layout.micro_batch_size,
        "tensor_parallel": layout.tensor,
        "pipeline_parallel": layout.pipeline,
        "data_parallel": layout.data,
    }


def train(*, model: Any, data: Any, trainer: Any, log: Any = None, resume: Any = None) -> None:
    """Trains a model: what `nemo.collections.llm.train` does, without the packages that it needs.

    Args:
        model: A Lightning module as NeMo's strategies want it.
        data: Its data module.
        trainer: `nemo.lightning.Trainer`.
        log: A NeMoLogger, or None.
        resume: An AutoResume that finds where to go on, or None.
    """
    if log is not None:
        log.setup(trainer, resume_if_exists=getattr(resume, "resume_if_exists", False))
    if resume is not None:
        resume.setup(trainer, model)
    trainer.fit(model, datamodule=data)


@dataclass(frozen=True)
class Outputs:
    """What a model returned for every sample, in no particular order.

    Attributes:
        output: float32 (N, ...).
        idx: int64 (N,).
        label: int64 (N,).
        latent: float32 (N, dimensions), or None where the model tells none.
    """

    output: np.ndarray
    idx: np.ndarray
    label: np.ndarray
    latent: np.ndarray | None = None

    def check_finite(self, source: str | None) -> None:
        """Refuses outputs that are NaN or infinite: finite weights can be too large as well.

        Args:
            source: The checkpoint that the model was loaded from, for the message.

        Raises:
            UserError: There are some.
        """
        values = [self.output] if self.latent is None else [self.output, self.latent]
        if not all(np.isfinite(value).all() for value in values):
            raise UserError(
                f"{source}: the model's outputs are NaN or infinite. Its weights are damaged or "
                "too large. Use another checkpoint."
            )


def predict(*, model: Any, data: Any, trainer: Any) -> Outputs | None:
    """Runs a model over the data module's prediction set, each sample exactly once.

    Args:
        model: Its `predict_step` returns a dict of `output`, `idx`, `label`, `loss_mask` and, where
            the model has one, `latent`.
        data: The data module.
        trainer: `nemo.lightning.Trainer`.

    Returns:
        All ranks' outputs on the job's first process, None on the others.
    """
    batches = trainer.predict(model, datamodule=data) or []
    columns: dict[str, np.ndarray] = {}
    is_source = (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    if is_source and batches:
        real = torch.cat([batch["loss_mask"] for batch in batches]) > 0
        for key in {"output", "idx", "label", "latent"} & batches[0].keys():
            values = torch.cat([batch[key] for batch in batches])[real]
            columns[key] = (values.float() if values.is_floating_point() else values).cpu().numpy()
    gathered: list[Any] = [None] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(gathered, columns)
    else:
        gathered = [columns]
    if not trainer.is_global_zero:
        return None
    parts = [part for part in gathered if part]
    return Outputs(**{key: np.concatenate([part[key] for part in parts]) for key in parts[0]})
