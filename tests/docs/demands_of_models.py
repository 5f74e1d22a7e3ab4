"""Experiments of docs/concepts.md on models: each one removes what NeMo or Megatron demands.

Each function runs in the ranks of a pool, trains with NeMo's own strategy, and returns the error or
the numbers that a user would see. `kept` keeps what is demanded, for comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.docs.fitting import Layout, error_of, train, with_model


def loss_of_torch() -> str:
    """torch's loss in place of a loss object."""
    import torch

    from model_components import BionemoLightningModule

    class Module(BionemoLightningModule):
        def training_loss_reduction(self) -> Any:
            return torch.nn.MSELoss()

    return error_of(lambda: train(base=Module))


def loss_without_report() -> str:
    """A loss object whose `forward` returns only the loss."""
    from model_components import BionemoLightningModule, MSELossReduction

    class OnlyLoss(MSELossReduction):
        def forward(self, batch: Any, forward_out: Any) -> Any:
            return super().forward(batch, forward_out)[0]

    class Module(BionemoLightningModule):
        def training_loss_reduction(self) -> Any:
            return OnlyLoss()

    return error_of(lambda: train(base=Module))


def loss_of_own_samples(kept: bool) -> str:
    """The first step's loss with a `reduce` that does not communicate."""
    import torch

    from model_components import BionemoLightningModule, MSELossReduction

    class OwnSamples(MSELossReduction):
        def reduce(self, losses_reduced_per_micro_batch: Any) -> Any:
            if kept:
                return super().reduce(losses_reduced_per_micro_batch)
            return torch.stack([report["avg"] for report in losses_reduced_per_micro_batch]).mean()

    class Module(BionemoLightningModule):
        def training_loss_reduction(self) -> Any:
            return OwnSamples()

    return f"{train(base=Module).losses[0]:.4f}"


def model_built_early() -> str:
    """A model that is built before NeMo has set up the process groups."""
    from model_components import BionemoLightningModule, PretrainConfig

    class Module(BionemoLightningModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.module = config.model_cls(config)

    return error_of(lambda: Module(config=PretrainConfig()))


def plain_linear_of_full_width() -> str:
    """torch's layer in place of the column-parallel linear1."""
    import torch

    from model_components import PretrainModel

    class Plain(PretrainModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear1 = torch.nn.Linear(28 * 28, config.hidden_size)

        def forward(self, x: Any) -> Any:
            z, _ = self.linear2(self.relu(self.linear1(x.flatten(1))))
            x_hat, _ = self.linear4(self.relu2(self.linear3(z)[0]))
            return {"x_hat": x_hat, "z": z}

    return error_of(lambda: train(with_model(Plain), layout=Layout(tensor=2)))


def replicated_layer(kept: bool, save_to: Path | None = None) -> str:
    """A replicated layer; its initial weights are equal on all tensor-parallel ranks, or not.

    Returns:
        A weight of this rank after two steps; with `save_to`, the size of the saved weight.
    """
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    from megakit.models import seeded
    from model_components import PretrainModel

    class Mixing(PretrainModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            rank = parallel_state.get_tensor_model_parallel_rank()
            with seeded(config.seed, "mixing" if kept else f"mixing of rank {rank}"):
                self.mixing = torch.nn.Linear(config.latent_size, config.latent_size)

        def forward(self, x: Any) -> Any:
            z, _ = self.linear2(self.relu(self.linear1(x.flatten(1))[0]))
            x_hat, _ = self.linear4(self.relu2(self.linear3(self.mixing(z))[0]))
            return {"x_hat": x_hat, "z": z}

    fitted = train(with_model(Mixing), layout=Layout(tensor=2), save_to=save_to)
    if save_to is not None:
        saved = dist_checkpointing.load_tensors_metadata(str(save_to / "weights"))
        return str(saved["module.mixing.weight"].global_shape)
    return f"{fitted.weights['mixing.weight'][0, 0]:.4f}"


def no_set_input_tensor() -> str:
    """A model without `set_input_tensor`, on a single rank."""
    from model_components import PretrainModel

    class Without(PretrainModel):
        def __getattribute__(self, name: str) -> Any:
            if name == "set_input_tensor":
                raise AttributeError(name)
            return super().__getattribute__(name)

    return error_of(lambda: train(with_model(Without)))


def training_step_returns_loss() -> str:
    """A `training_step` that returns the loss, as Lightning documents it."""
    import torch

    from model_components import BionemoLightningModule

    class Module(BionemoLightningModule):
        def training_step(self, batch: Any, batch_idx: int | None = None) -> Any:
            return torch.nn.functional.mse_loss(self(batch)["x_hat"], batch["data"].flatten(1))

    return error_of(lambda: train(base=Module))


def training_step_runs_backward() -> str:
    """A `training_step` that calls `backward`."""
    import torch

    from model_components import BionemoLightningModule

    class Module(BionemoLightningModule):
        def training_step(self, batch: Any, batch_idx: int | None = None) -> Any:
            output = self(batch)
            torch.nn.functional.mse_loss(output["x_hat"], batch["data"].flatten(1)).backward()
            return output

    return error_of(lambda: train(base=Module))


def dropout_mask(kept: bool) -> list[list[bool]]:
    """This rank's first dropout mask of the features that tensor parallelism shards, (8, 32)."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from model_components import PretrainModel

    masks: list[Any] = []

    class Dropout(PretrainModel):
        def forward(self, x: Any) -> Any:
            hidden = self.relu(self.linear1(x.flatten(1))[0])
            ones = torch.ones_like(hidden)
            if kept:
                with get_cuda_rng_tracker().fork():
                    mask = torch.nn.functional.dropout(ones, 0.5)
            else:
                mask = torch.nn.functional.dropout(ones, 0.5)
            masks.append((mask > 0).tolist())
            z, _ = self.linear2(hidden * mask)
            x_hat, _ = self.linear4(self.relu2(self.linear3(z)[0]))
            return {"x_hat": x_hat, "z": z}

    train(with_model(Dropout), layout=Layout(tensor=2))
    mask: list[list[bool]] = masks[0]
    return mask


def place_of_gradients() -> str:
    """Where the gradient of linear1 is before the step of NeMo's own optimizer module."""
    import lightning.pytorch as pl
    from megatron.core.optimizer import OptimizerConfig
    from nemo.lightning.pytorch.optim import MegatronOptimizerModule

    from model_components import BionemoLightningModule

    class OfNemo(BionemoLightningModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config=config)
            self.optim = MegatronOptimizerModule(OptimizerConfig("adam", lr=1e-4))
            self.optim.connect(self)

    found: list[str] = []

    class Look(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            weights = {name.rpartition("module.")[2]: w for name, w in pl_module.named_parameters()}
            weight = weights["linear1.weight"]
            found.append(f"grad: {weight.grad}, main_grad: {[*weight.main_grad.shape]}")

        def __deepcopy__(self, memo: object) -> Look:
            return self  # NeMo copies callbacks in order to record them

    train(base=OfNemo, callbacks=(Look(),))
    return found[0]


def unused_weight(overlap: bool) -> str:
    """A weight, at first 1, on which the loss does not depend: the error, or the weight later."""
    import torch

    from model_components import PretrainModel

    class Unused(PretrainModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.unused = torch.nn.Parameter(torch.ones(1))

    weights: dict[str, Any] = {}
    layout = Layout(overlap=overlap)
    error = error_of(lambda: weights.update(train(with_model(Unused), layout=layout).weights))
    return f"{weights['unused'][0]}" if weights else error


def stage_of_another_shape() -> str:
    """A stage that sends a larger tensor than the next stage expects, with NeMo's own strategy."""
    from model_components import PretrainConfig

    config = PretrainConfig(hidden_size=4, latent_size=6)
    return error_of(lambda: train(config, layout=Layout(pipeline=2)))
