"""Experiments of docs/concepts.md: each one removes what NeMo or Megatron demands.

Each function has the name that the page gives its result, and returns the error or the number that
a user would see. `kept` keeps what is demanded, for comparison. `folder` is for checkpoints.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from nemo.lightning.pytorch.optim import MegatronOptimizerModule
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader

from megakit.data import MultiEpochDatasetWrapper
from megakit.models import seeded
from megakit.testing import distributed_model_parallel_state
from model_components import (
    BionemoLightningModule,
    MNISTDataModule,
    MSELossReduction,
    PretrainConfig,
    PretrainModel,
)
from tests.docs.fitting import MICRO_BATCH, Changed, digits, error_of, train

# --- 1. Loss objects ------------------------------------------------------------------------------


def loss_of_torch() -> str:
    return error_of(lambda: train(training_loss_reduction=lambda module: torch.nn.MSELoss()))


def loss_of_own_samples(kept: bool) -> str:
    """The first step's loss with a `reduce` that does not communicate."""

    class OwnSamples(MSELossReduction):
        def reduce(self, losses_reduced_per_micro_batch: Any) -> Any:
            if kept:
                return super().reduce(losses_reduced_per_micro_batch)
            return torch.stack([report["avg"] for report in losses_reduced_per_micro_batch]).mean()

    return f"{train(training_loss_reduction=lambda module: OwnSamples()).losses[0]:.4f}"


# --- 2., 10. Data: the order, random effects, the last batch --------------------------------------


def random_effects(kept: bool) -> str:
    """The mean of the first sample on each of two tensor-parallel ranks, with random brightness."""
    means: list[float] = []
    generator = np.random.default_rng(int(os.environ["RANK"]))

    class Brightness(MultiEpochDatasetWrapper[Any, Any]):
        def apply_transform(self, sample: Any, index: Any) -> Any:
            own = np.random.default_rng([index.epoch, index.idx]) if kept else generator
            return {**sample, "data": sample["data"] * float(own.uniform(0.5, 1))}

    class Data(MNISTDataModule):
        def with_random_effects(self, train: Any) -> Any:
            return Brightness(train)

    def record(self: Any, batch: Any, batch_idx: int | None = None) -> Any:
        means.append(float(batch["data"][0].mean()))
        return self(batch, batch_idx)

    train(data=digits(Data), tensor=2, training_step=record)
    return f"{means[0]:.4f}"


def _samples(step: str, data: Any, **how: Any) -> list[int]:
    """The indices of the samples that a step of the Lightning module gets in a training."""
    samples: list[int] = []

    def record(self: Any, batch: Any, batch_idx: int | None = None) -> Any:
        is_sample = batch.get("loss_mask", batch["idx"] >= 0) > 0
        samples.extend(batch["idx"][is_sample].tolist())
        return self(batch, batch_idx)

    train(data=data, **how, **dict[str, Any]({step: record}))
    return samples


def _sampled_by_nemo(data: Any) -> Any:
    data.data_sampler = MegatronDataSampler(1, micro_batch_size=MICRO_BATCH, global_batch_size=32)
    return data


def shuffling_loader() -> str:
    """The first samples of a loader that shuffles."""

    class Data(MNISTDataModule):
        def with_random_effects(self, train: Any) -> Any:
            self.plain = train
            return super().with_random_effects(train)

        def train_dataloader(self) -> Any:
            return DataLoader(self.plain, batch_size=MICRO_BATCH, shuffle=True)

    samples = _samples("training_step", _sampled_by_nemo(digits(Data)))
    return ", ".join(str(index) for index in samples[:8])


def validated_samples(kept: bool) -> str:
    """How many of 200 samples a validation with global batches of 32 computes."""
    data = digits() if kept else _sampled_by_nemo(digits())
    return f"{len(set(_samples('validation_step', data, validate=True)))} of 200"


# --- 3., 4. Models --------------------------------------------------------------------------------


def plain_linear_of_full_width() -> str:
    """torch's layer in place of the column-parallel linear1."""

    class Linear(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x), None

    class Plain(Changed):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear1 = Linear(28 * 28, config.hidden_size)

    return error_of(lambda: train(Plain, tensor=2))


def replicated_layer(kept: bool) -> str:
    """A weight of a replicated layer after two steps."""

    class Mixing(Changed):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            rank = parallel_state.get_tensor_model_parallel_rank()
            with seeded(config.seed, "mixing" if kept else f"mixing of rank {rank}"):
                self.mixing = torch.nn.Linear(config.latent_size, config.latent_size)

        def on_latent(self, z: Any) -> Any:
            return self.mixing(z)

    return f"{train(Mixing, tensor=2).weights['mixing.weight'][0, 0]:.4f}"


# --- 7. Checkpoints -------------------------------------------------------------------------------


def saved_by_torch(folder: Path) -> None:
    """Saves the weights of rank 0 of two tensor-parallel ranks by `torch.save`."""
    fitted = train(tensor=2)
    if os.environ["RANK"] == "0":
        weights = {name: torch.tensor(weight) for name, weight in fitted.weights.items()}
        torch.save(weights, folder / "weights.pt")


def loaded_by_torch(folder: Path) -> str:
    """Loads the file of `saved_by_torch` into the whole model."""
    with distributed_model_parallel_state(accelerator="cpu"):
        model = PretrainConfig().configure_model()
        weights = torch.load(folder / "weights.pt", weights_only=True)
        error = error_of(lambda: model.load_state_dict(weights, strict=False))
        return error.splitlines()[1].strip()


def own_shards(kept: bool, folder: Path) -> str:
    """The saved size of a weight that a model shards over two tensor-parallel ranks itself.

    With `kept`, `sharded_state_dict` describes the shards.
    """

    class Scaled(Changed):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = torch.nn.Parameter(torch.ones(config.hidden_size // 2))

        def on_hidden(self, hidden: Any) -> Any:
            return hidden * self.scale

        def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
            state = super().sharded_state_dict(prefix, *args, **kwargs)
            if kept:
                shards = {"scale": self.scale}
                state |= make_sharded_tensors_for_checkpoint(shards, prefix, {"scale": 0})
            return state

    folder = folder / str(kept)
    train(Scaled, tensor=2, save_to=folder)
    saved = dist_checkpointing.load_tensors_metadata(str(folder / "weights"))
    return f"{saved['module.scale'].global_shape[0]} of 64 numbers"


# --- 8. to 10. Random numbers, gradients, shapes --------------------------------------------------


def dropout_mask(kept: bool) -> str:
    """How the first dropout masks of two tensor-parallel ranks compare."""
    masks: list[Any] = []

    class Dropout(Changed):
        def on_hidden(self, hidden: Any) -> Any:
            ones = torch.ones_like(hidden)
            if kept:
                with get_cuda_rng_tracker().fork():
                    mask = torch.nn.functional.dropout(ones, 0.5)
            else:
                mask = torch.nn.functional.dropout(ones, 0.5)
            masks.append(mask)
            return hidden * mask

    train(Dropout, tensor=2)
    both = [torch.empty_like(masks[0]) for _ in range(2)]
    torch.distributed.all_gather(both, masks[0])
    share = float((both[0] == both[1]).float().mean())
    # How many are equal by chance depends on the processor's random numbers.
    how_many = "all" if share == 1 else "about half of" if 0.35 < share < 0.65 else f"{share} of"
    return f"{how_many} {masks[0].numel()} positions are equal"


def place_of_gradients() -> str:
    """Where the gradient of linear1 is before the step of NeMo's own optimizer module."""

    def initialize(self: Any, config: Any) -> None:
        BionemoLightningModule.__init__(self, config=config)
        self.optim = MegatronOptimizerModule(OptimizerConfig("adam", lr=1e-4))
        self.optim.connect(self)

    return train(__init__=initialize).gradient


def unused_weight(overlap: bool = True) -> str:
    """A weight, at first 1, on which the loss does not depend: the error, or the weight later."""

    class Unused(PretrainModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.unused = torch.nn.Parameter(torch.ones(1))

    if overlap:
        return error_of(lambda: train(Unused, overlap=True))
    return str(train(Unused).weights["unused"][0])


def stage_of_another_shape() -> None:
    """A stage that sends a larger tensor than the next stage expects, with NeMo's own strategy."""
    train(sizes={"hidden_size": 4, "latent_size": 6}, pipeline=2)
