"""One training for the experiments of docs/concepts.md: NeMo's strategy on the bundled digits.

A rank of the pool is patched for CPUs before it imports this module, and with it the frameworks.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl

from megakit.runtime.saving import write_in_threads
from model_components import BionemoLightningModule, MNISTDataModule, PretrainConfig, PretrainModel

MICRO_BATCH = 8


class Changed(PretrainModel):
    """The project's autoencoder with a place for a change after each part of the trunk."""

    def on_hidden(self, hidden: Any) -> Any:
        return hidden

    def on_latent(self, z: Any) -> Any:
        return z

    def forward(self, x: Any) -> Any:
        z, _ = self.linear2(self.on_hidden(self.relu(self.linear1(x.flatten(1))[0])))
        x_hat, _ = self.linear4(self.relu2(self.linear3(self.on_latent(z))[0]))
        return {"x_hat": x_hat, "z": z}


@dataclass
class Watch(pl.Callback):
    """What one rank saw of a training; saves at the end.

    Attributes:
        save_to: Where NeMo saves a checkpoint after the last step.
        losses: The loss that each step returned.
        weights: This rank's weights after the last step, by name.
        gradient: Where the gradient of linear1 is before the optimizer's step.
    """

    save_to: Path | None = None
    losses: list[float] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    gradient: str = ""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        weight = next(w for name, w in pl_module.named_parameters() if "linear1.weight" in name)
        self.gradient = f"grad: {weight.grad}, main_grad: {[*weight.main_grad.shape]}"

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for name, weight in pl_module.named_parameters():
            self.weights[name.replace("module.", "")] = weight.detach().float().numpy().copy()
        if self.save_to is not None:
            write_in_threads()  # NeMo starts a process for each writer, which takes seconds
            trainer.save_checkpoint(str(self.save_to))

    def __deepcopy__(self, memo: object) -> "Watch":
        return self  # NeMo copies callbacks in order to record them


def digits(base: Any = MNISTDataModule, global_batch: int = 32) -> Any:
    """The project's data module, or a subclass of it, with the digits of scikit-learn."""
    return base("/nonexistent", MICRO_BATCH, dataset="digits", global_batch_size=global_batch)


def train(
    model: Any = None,
    data: Any = None,
    *,
    sizes: Any = None,
    tensor: int = 1,
    pipeline: int = 1,
    overlap: bool = False,
    validate: bool = False,
    save_to: Path | None = None,
    strategy: Any = nl.MegatronStrategy,
    steps: int = 2,
    **methods: Any,
) -> Watch:
    """Trains the project's autoencoder in float32 on a CPU, or what an experiment made of it.

    Args:
        model: The model's class instead of the project's.
        data: The data module; by default `digits`.
        sizes: Fields of the model's config.
        tensor: Tensor-parallel size.
        pipeline: Pipeline-parallel size.
        overlap: Whether Megatron reduces gradients during the backward pass.
        validate: Whether to validate after the last step.
        save_to: Where NeMo saves a checkpoint after the last step; None for nowhere.
        strategy: The class of the strategy; NeMo's by default.
        steps: Number of optimizer steps.
        **methods: Methods of the Lightning module instead of the project's.
    """
    config: Any = PretrainConfig(**(sizes or {}))
    config.model_cls = model or config.model_cls
    # A class of this training: NeMo patches the class of the module.
    module_cls = type("Module", (BionemoLightningModule,), methods)
    watch = Watch(save_to)
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            ddp=DistributedDataParallelConfig(overlap_grad_reduce=overlap),
            ckpt_async_save=False,
            replace_progress_bar=False,
        ),
        plugins=nl.MegatronMixedPrecision(precision="32"),
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
    trainer.fit(module_cls(config=config), datamodule=data or digits())
    return watch


def error_of(work: Callable[[], object]) -> str:
    """The class and the message of the error that the work raises."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
