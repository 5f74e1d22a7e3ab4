"""Trainings for the experiments of docs/concepts.md: NeMo's own strategy on the bundled digits.

The experiments run in the ranks of a pool, which are patched for CPUs before they import the
frameworks. So this module imports the frameworks late.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layout:
    """Sizes of a training.

    Attributes:
        tensor: Tensor-parallel size.
        pipeline: Pipeline-parallel size.
        micro_batch: Samples per rank and forward pass.
        global_batch: Samples per step over all ranks.
        overlap: Whether Megatron reduces gradients during the backward pass.
    """

    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 8
    global_batch: int = 32
    overlap: bool = False


PLAIN = Layout()


@dataclass
class Fitted:
    """What one rank saw of a training.

    Attributes:
        losses: The loss that each step returned.
        weights: This rank's weights after the last step, by name.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def fit(
    module: Any,
    data: Any,
    layout: Layout = PLAIN,
    *,
    steps: int = 2,
    save_to: Path | None = None,
    with_context: bool = False,
    validate: bool = False,
    exact: bool = False,
    callbacks: tuple[Any, ...] = (),
) -> Fitted:
    """Trains with NeMo's trainer and strategy, in float32 on a CPU.

    Args:
        module: The Lightning module.
        data: The data module.
        layout: Sizes of the training.
        steps: Number of optimizer steps.
        save_to: Where NeMo saves a checkpoint after the last step; None for nowhere.
        with_context: Whether NeMo saves the context, too, as its `ModelCheckpoint` does.
        validate: Whether to validate after the last step.
        exact: Whether to use the project's subclass of NeMo's strategy.
        callbacks: Further Lightning callbacks.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from nemo import lightning as nl

    from megakit.training.strategy import ExactStrategy

    fitted = Fitted()
    strategy = (ExactStrategy if exact else nl.MegatronStrategy)(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        ddp=DistributedDataParallelConfig(overlap_grad_reduce=layout.overlap),
        ckpt_async_save=False,
        replace_progress_bar=False,
    )
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy,
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
        callbacks=[_watch(fitted, save_to, with_context), *callbacks],
    )
    trainer.fit(module, datamodule=data)
    return fitted


def _watch(fitted: Fitted, save_to: Path | None, with_context: bool) -> Any:
    """A callback that fills `fitted`, and saves at the end."""
    import lightning.pytorch as pl
    from nemo.lightning.io.pl import TrainerContext

    from megakit.runtime.saving import write_in_threads

    class Watch(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *args: Any
        ) -> None:
            fitted.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            fitted.weights.update(weights_of(pl_module))
            if save_to is not None:
                write_in_threads()  # NeMo starts a process for each writer, which takes seconds
                trainer.save_checkpoint(str(save_to))
                if with_context:
                    TrainerContext.from_trainer(trainer).io_dump(save_to / "context", [])

        def __deepcopy__(self, memo: object) -> Watch:
            return self  # NeMo copies callbacks in order to record them

    return Watch()


def weights_of(module: Any) -> dict[str, np.ndarray]:
    """This rank's weights, without the names of what Megatron wraps around the model."""
    return {
        name.replace("module.", ""): weight.detach().float().numpy().copy()
        for name, weight in module.named_parameters()
    }


def digits(layout: Layout = PLAIN, base: Any = None) -> Any:
    """The project's data module, or a subclass of it, with the digits of scikit-learn."""
    from model_components import MNISTDataModule

    return (base or MNISTDataModule)(
        "/nonexistent",
        layout.micro_batch,
        dataset="digits",
        global_batch_size=layout.global_batch,
    )


def train(
    config: Any = None, base: Any = None, layout: Layout = PLAIN, data: Any = None, **how: Any
) -> Fitted:
    """Trains the project's autoencoder, or what an experiment made of it.

    Args:
        config: The model's config; the project's by default.
        base: The class of the Lightning module; the project's by default.
        layout: Sizes of the training.
        data: The data module; by default `digits`.
        **how: Further arguments of `fit`.
    """
    from model_components import BionemoLightningModule, PretrainConfig

    class Module(base or BionemoLightningModule):  # type: ignore[misc]
        """A class of this training: NeMo patches the class of the module."""

    return fit(Module(config=config or PretrainConfig()), data or digits(layout), layout, **how)


def with_model(model_cls: Any, **fields: Any) -> Any:
    """The project's config for another model class."""
    from model_components import PretrainConfig

    config: Any = PretrainConfig(**fields)
    config.model_cls = model_cls
    return config


def error_of(work: Callable[[], object]) -> str:
    """The class and the message of the error that the work raises."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
