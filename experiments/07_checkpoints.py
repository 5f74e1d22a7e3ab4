"""7. Distributed checkpoints with a context.

Two tensor-parallel ranks each hold half of the sharded weights. What does a file contain that
`torch.save` writes on rank 0? And if your own code shards a weight, how does Megatron know?

The file contains the weights of rank 0. Megatron treats a weight as replicated if
`sharded_state_dict` does not describe its parts. Then the checkpoint lacks half of the weight, and
no error is raised.

Try: in the second run, replace `with as_one_process():` by `if True:`, so both ranks load the file,
and return `str(torch.equal(model.linear1.weight, weights["linear1.weight"]))`. Which rank gets its
own weights back?
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from experiments.training import HookedModel, as_one_process, train
from megakit.models.partial_loading import load_model_weights
from megakit.training import megatron_adam
from model_components import BionemoLightningModule, PretrainConfig

CHECKPOINT = Path("checkpoint")


class Scaled(HookedModel):
    """The autoencoder with a weight of 64 numbers, which this code shards over two ranks."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size // 2))

    def on_hidden(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class Described(Scaled):
    """Describes the parts of the weight: it is sharded along axis 0."""

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        state = super().sharded_state_dict(prefix, *args, **kwargs)
        return state | make_sharded_tensors_for_checkpoint(
            {"scale": self.scale}, prefix, {"scale": 0}
        )


class NoMixin(pl.LightningModule):
    """The project's Lightning module without `IOMixin`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.optim = config, megatron_adam(lr=1e-4)
        self.optim.connect(self)

    configure_model = BionemoLightningModule.configure_model
    forward = BionemoLightningModule.forward
    training_step = BionemoLightningModule.training_step
    training_loss_reduction = BionemoLightningModule.training_loss_reduction
    loss_reduction_class = BionemoLightningModule.loss_reduction_class


def saved_size_of_scale(model: type[Scaled]) -> str:
    """Saves a model, and returns the size of `scale` in the checkpoint."""
    train(PretrainConfig(model_cls=model), tensor=2, save_to=CHECKPOINT)
    saved = dist_checkpointing.load_tensors_metadata(str(CHECKPOINT / "weights"))
    return f"{saved['module.scale'].global_shape[0]} of 64 numbers"


def with_distributed_checkpoint() -> str:
    """One process loads what `dist_checkpointing` saved on two ranks."""
    train(tensor=2, save_to=CHECKPOINT)
    with as_one_process():
        model = PretrainConfig().configure_model()
        load_model_weights(model, CHECKPOINT)
        return f"linear1.weight has the shape {[*model.linear1.weight.shape]}"


def without_distributed_checkpoint() -> str:
    """One process loads what `torch.save` saved on rank 0 of two ranks."""
    weights = train(tensor=2).weights
    if torch.distributed.get_rank() == 0:
        torch.save(weights, "weights.pt")
    torch.distributed.barrier()
    with as_one_process():
        model = PretrainConfig().configure_model()
        model.load_state_dict(torch.load("weights.pt"), strict=False)
        return f"linear1.weight has the shape {[*model.linear1.weight.shape]}"


def with_described_shards() -> str:
    """The saved part of a weight that `sharded_state_dict` describes."""
    return saved_size_of_scale(Described)


def without_described_shards() -> str:
    """The saved part of a weight without an entry in `sharded_state_dict`."""
    return saved_size_of_scale(Scaled)


def without_context() -> str:
    """A Lightning module without `IOMixin`."""
    train(module=NoMixin, save_to=CHECKPOINT)
    return "saved"
