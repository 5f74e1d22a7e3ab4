"""Builds the trainer: Lightning's `Trainer` with NeMo's strategy, every argument in plain sight.

`nl.Trainer` is Lightning's Trainer. The strategy shares the work among the ranks. `ExactStrategy`
is megakit's subclass of NeMo's MegatronStrategy: a step takes less time, and each sample counts
once in the validation loss. It takes the arguments of NeMo's class.

`run` has the checked options of the command line, which checkpoints and reports name, so change
an option rather than what comes from `run`. `run.callbacks()` are ordinary callbacks, which write
metrics.csv and checkpoints, show progress, and save when the job is stopped.
"""

from collections.abc import Sequence

# Before all other imports of Megatron; its docstring gives the reason.
import megakit.runtime.import_megatron  # isort: skip  # noqa: F401
import lightning.pytorch as pl
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl

from megakit.job import Run
from megakit.training import ExactStrategy


def build_trainer(run: Run, callbacks: Sequence[pl.Callback] = ()) -> nl.Trainer:
    """Returns the trainer of a run, which trains or predicts."""
    strategy = ExactStrategy(
        tensor_model_parallel_size=run.layout.tensor,
        pipeline_model_parallel_size=run.layout.pipeline,
        parallel_devices=run.devices,  # one for each process of this machine
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=False),  # True: shards Adam
        timeout=run.timeout,  # how long a rank waits for another rank
        cuda_graph=False,  # True: a GPU repeats a step as one CUDA graph, see docs/performance.md
    )
    return nl.Trainer(
        accelerator=run.accelerator.name,
        devices="auto",  # the strategy names them
        num_nodes=run.layout.num_nodes,
        strategy=strategy,
        plugins=nl.MegatronMixedPrecision(precision=run.precision),
        max_steps=run.max_steps,
        val_check_interval=run.val_interval,
        check_val_every_n_epoch=None,  # the interval counts steps: the training is one epoch
        limit_val_batches=run.limit_val_batches,
        num_sanity_val_steps=0,
        logger=run.logger(),
        log_every_n_steps=10,
        callbacks=[*callbacks, *run.callbacks()],
        enable_progress_bar=False,  # `run.callbacks()` shows progress
        enable_model_summary=False,
        use_distributed_sampler=False,  # Megatron's sampler divides the samples
    )
