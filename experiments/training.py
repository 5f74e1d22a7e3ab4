"""One short training for the experiments: NeMo's own strategy and the digits of scikit-learn.

A rank is patched for CPUs before it imports this module, and with it the frameworks.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl
from nemo.lightning.io.pl import TrainerContext
from torch import Tensor

from megakit.nemo.writer import write_context
from megakit.runtime.accelerator import destroy_parallel_state
from megakit.runtime.writer_threads import write_in_threads
from megakit.testing import distributed_model_parallel_state
from model_components import BionemoLightningModule, MNISTDataModule, PretrainConfig, PretrainModel

MICRO_BATCH, GLOBAL_BATCH = 8, 32


class HookedModel(PretrainModel):
    """The project's autoencoder with a place for a change after each part of the trunk."""

    def on_hidden(self, hidden: Tensor) -> Tensor:
        return hidden

    def on_latent(self, z: Tensor) -> Tensor:
        return z

    def forward(self, x: Tensor) -> Any:
        z, _ = self.linear2(self.on_hidden(self.relu(self.linear1(x.flatten(1))[0])))
        x_hat, _ = self.linear4(self.relu2(self.linear3(self.on_latent(z))[0]))
        return {"x_hat": x_hat, "z": z}


@dataclass
class Watch(pl.Callback):
    """Records what one rank sees of a training, and saves at the end.

    Attributes:
        save_to: Folder of the checkpoint that NeMo saves after the last step; None for none.
        losses: The logged loss of each step.
        weights: This rank's weights after the last step, by name.
    """

    save_to: Path | None = None
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> str:
        """The loss of the last step, to be printed."""
        return f"loss {self.losses[-1]:.4f}"

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        loss = torch.as_tensor(outputs["loss"] if isinstance(outputs, dict) else outputs).float()
        # Only the last pipeline stage has the loss.
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(loss, last, group)
        self.losses.append(float(loss))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for name, weight in pl_module.named_parameters():
            self.weights[name.replace("module.", "")] = weight.detach().clone()
        if self.save_to is not None:
            write_in_threads()  # NeMo starts a process for each writer, which takes seconds
            trainer.save_checkpoint(str(self.save_to))
            # As NeMo's ModelCheckpoint does. The context of the trainer is not needed.
            context = TrainerContext.from_trainer(trainer)
            if trainer.is_global_zero:
                write_context(self.save_to / "context", context.model)
            trainer.strategy.barrier()

    def __deepcopy__(self, memo: object) -> "Watch":
        return self  # NeMo copies callbacks in order to record them


def digits(base: Any = MNISTDataModule, global_batch_size: int = GLOBAL_BATCH) -> Any:
    """Returns the project's data module, or a subclass of it, with the digits of scikit-learn."""
    return base(None, MICRO_BATCH, dataset="digits", global_batch_size=global_batch_size)


def train(
    config: Any = None,
    module: Any = BionemoLightningModule,
    data: Any = None,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    strategy: Any = nl.MegatronStrategy,
    overlap_grad_reduce: bool = False,
    validate: bool = False,
    save_to: Path | None = None,
    steps: int = 2,
    precision: Any = "32",
) -> Watch:
    """Trains the project's autoencoder on CPUs, or what an experiment made of it.

    Ranks that are neither tensor-parallel nor pipeline-parallel are data-parallel.

    Args:
        config: Names the model and the loss; by default `PretrainConfig`.
        module: The class of the Lightning module.
        data: The data module; by default `digits`.
        tensor: Number of tensor-parallel ranks.
        pipeline: Number of pipeline stages.
        strategy: The class of the strategy.
        overlap_grad_reduce: Whether Megatron reduces gradients during the backward pass.
        validate: Whether to validate after the last step.
        save_to: Folder of the checkpoint that NeMo saves after the last step; None for none.
        steps: Number of optimizer steps.
        precision: NeMo's name of the precision; by default float32.
    """
    watch = Watch(save_to)
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            ddp=DistributedDataParallelConfig(overlap_grad_reduce=overlap_grad_reduce),
            ckpt_async_save=False,
            replace_progress_bar=False,
        ),
        plugins=nl.MegatronMixedPrecision(precision=precision),
        max_steps=steps,
        limit_val_batches=1.0 if validate else 0,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[watch],
    )
    trainer.fit(module(config or PretrainConfig()), datamodule=data or digits())
    return watch


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Makes this rank a job of its own after the training, so it builds whole layers."""
    destroy_parallel_state()
    with distributed_model_parallel_state(rank=0, world_size=1, accelerator="cpu"):
        yield
