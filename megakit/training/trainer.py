"""NeMo's strategy and trainer, set up for one of our runs, and the two things to do with them."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl

from megakit.checkpoints.writer import CheckpointWriter
from megakit.reporting.metrics import MetricsFile
from megakit.runtime.saving import write_within_this_process
from megakit.training.callbacks import ExactSteps, Reporter, StopOnSignal
from megakit.training.launch import end_with_torchrun
from megakit.training.layout import Layout
from megakit.training.script import Run
from megakit.training.strategy import ExactStrategy


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
            # ExactStrategy looks at the gradient's norm, which is there anyway.
            check_for_nan_in_grad=False,
            use_distributed_optimizer=use_distributed_optimizer,
        ),
        # Saves are short, and a writer in the background would not be exact.
        ckpt_async_save=False,
        # Of the distributed optimizer's formats, the one that can be read back.
        ckpt_optim_fully_reshardable=use_distributed_optimizer,
        replace_progress_bar=False,
    )


def build_trainer(run: Run, *, use_distributed_optimizer: bool = False) -> nl.Trainer:
    """A trainer for this run's layout, precision and length, with what our runs leave behind.

    Args:
        run: What is to be done, and where.
        use_distributed_optimizer: See `build_strategy`.
    """
    options, layout = run.options, run.layout
    end_with_torchrun(run.console)
    # NeMo takes the time-out of its process groups from here.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(options.timeout))
    common: dict[str, Any] = {
        "accelerator": run.accelerator.name,
        "devices": layout.devices,
        "num_nodes": layout.num_nodes,
        "strategy": build_strategy(layout, use_distributed_optimizer),
        "plugins": nl.MegatronMixedPrecision(precision=options.precision),
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    if not run.trains:
        return nl.Trainer(**common, logger=False, enable_checkpointing=False)
    resumed_step = run.resumed_step
    metrics = MetricsFile(run.path / "metrics.csv", resumed_step) if run.is_main else None
    writer = CheckpointWriter(
        run.directory.checkpoints, run.manifest(), options.save_interval, run.best_by
    )
    return nl.Trainer(
        **common,
        max_steps=options.max_steps,
        val_check_interval=options.val_interval,
        # Steps, not epochs, count: the training set is as long as the training.
        check_val_every_n_epoch=None,
        limit_val_batches=1.0,
        # Values go to the logger by `Reporter`.
        log_every_n_steps=options.max_steps + 1,
        # What an earlier start logged beyond the step that it goes on from is hidden.
        logger=TensorBoardLogger(
            run.path,
            name="",
            version="tensorboard",
            default_hp_metric=False,
            purge_step=resumed_step + 1,
        ),
        callbacks=[
            ExactSteps(),
            Reporter(run.console, run.stage.name, metrics),
            StopOnSignal(writer),
            writer,
        ],
    )


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
    """

    output: np.ndarray
    idx: np.ndarray
    label: np.ndarray


def predict(*, model: Any, data: Any, trainer: Any) -> Outputs | None:
    """Runs a model over the data module's prediction set, each sample exactly once.

    Args:
        model: Its `predict_step` returns a dict of `output`, `idx`, `label` and `loss_mask`.
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
        for key in ("output", "idx", "label"):
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
