"""Experiments of docs/concepts.md on data and checkpoints: see `demands_of_models`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.docs.fitting import PLAIN, Layout, digits, error_of, fit, train, with_model


def _recording(samples: list[int], step: str = "training_step") -> Any:
    """A Lightning module that records the indices of the samples that a step gets."""
    from model_components import BionemoLightningModule

    def record(self: Any, batch: Any, batch_idx: int | None = None) -> Any:
        is_sample = batch.get("loss_mask", batch["idx"] >= 0) > 0
        samples.extend(batch["idx"][is_sample].tolist())
        return self(batch, batch_idx)

    return type("Recording", (BionemoLightningModule,), {step: record})


def random_effects(kept: bool) -> str:
    """The mean of the first sample on each of two tensor-parallel ranks, with random brightness."""
    import numpy as np

    from megakit.data import MultiEpochDatasetWrapper
    from model_components import BionemoLightningModule, MNISTDataModule

    means: list[float] = []
    generator = np.random.default_rng(int(os.environ["RANK"]))

    class Brightness(MultiEpochDatasetWrapper[Any, Any]):
        def apply_transform(self, sample: Any, index: Any) -> Any:
            own = np.random.default_rng([index.epoch, index.idx]) if kept else generator
            return {**sample, "data": sample["data"] * float(own.uniform(0.5, 1))}

    class Data(MNISTDataModule):
        def with_random_effects(self, train: Any) -> Any:
            return Brightness(train)

    class Module(BionemoLightningModule):
        def training_step(self, batch: Any, batch_idx: int | None = None) -> Any:
            means.append(float(batch["data"][0].mean()))
            return self(batch, batch_idx)

    layout = Layout(tensor=2)
    train(base=Module, layout=layout, data=digits(layout, Data))
    return f"{means[0]:.4f}"


def shuffling_loader() -> str:
    """The first samples of a loader that shuffles."""
    samples: list[int] = []
    base = _recording(samples)
    from torch.utils.data import DataLoader

    from model_components import MNISTDataModule

    class Data(MNISTDataModule):
        def with_random_effects(self, train: Any) -> Any:
            self.plain = train
            return super().with_random_effects(train)

        def train_dataloader(self) -> Any:
            return DataLoader(self.plain, batch_size=8, shuffle=True)

    data = digits(PLAIN, Data)
    data.data_sampler = _sampler_of_nemo()
    train(base=base, data=data)
    return ", ".join(str(index) for index in samples[:8])


def no_data_sampler() -> str:
    """A plain data module of Lightning."""
    base = _recording([])
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from mnist.files import read_splits
    from model_components import MNISTCustom

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            sets = read_splits(Path("/nonexistent"), "digits", MNISTCustom.from_arrays)
            return DataLoader(sets[0], batch_size=8, shuffle=True)

    return error_of(lambda: train(base=base, data=Data()))


def validated_samples(kept: bool) -> str:
    """How many of 200 samples a validation with global batches of 32 computes."""
    samples: list[int] = []
    base = _recording(samples, "validation_step")
    data = digits()
    if not kept:
        data.data_sampler = _sampler_of_nemo()
    train(base=base, data=data, validate=True)
    return f"{len(set(samples))} of 200"


def _sampler_of_nemo() -> Any:
    from nemo.lightning.pytorch.plugins import MegatronDataSampler

    return MegatronDataSampler(
        seq_len=1, micro_batch_size=PLAIN.micro_batch, global_batch_size=PLAIN.global_batch
    )


def saved_by_torch(folder: Path) -> None:
    """Saves the weights of rank 0 of two tensor-parallel ranks by `torch.save`."""
    import torch

    fitted = train(layout=Layout(tensor=2))
    if os.environ["RANK"] == "0":
        weights = {name: torch.tensor(weight) for name, weight in fitted.weights.items()}
        torch.save(weights, folder / "weights.pt")


def loaded_by_torch(folder: Path) -> str:
    """Loads the file of `saved_by_torch` into the whole model."""
    import torch

    from megakit.testing import distributed_model_parallel_state

    with distributed_model_parallel_state(accelerator="cpu"):
        from model_components import PretrainConfig

        model = PretrainConfig().configure_model()
        weights = torch.load(folder / "weights.pt", weights_only=True)
        return (
            error_of(lambda: model.load_state_dict(weights, strict=False)).splitlines()[1].strip()
        )


def own_shards(folder: Path, kept: bool) -> str:
    """The saved size of a weight that a model shards over two tensor-parallel ranks itself.

    With `kept`, `sharded_state_dict` describes the shards.
    """
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    from model_components import PretrainModel

    class Scaled(PretrainModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            size = parallel_state.get_tensor_model_parallel_world_size()
            self.scale = torch.nn.Parameter(torch.ones(config.hidden_size // size))

        def forward(self, x: Any) -> Any:
            z, _ = self.linear2(self.relu(self.linear1(x.flatten(1))[0]) * self.scale)
            x_hat, _ = self.linear4(self.relu2(self.linear3(z)[0]))
            return {"x_hat": x_hat, "z": z}

        def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
            state = super().sharded_state_dict(prefix, *args, **kwargs)
            if kept:
                shards = {"scale": self.scale}
                state |= make_sharded_tensors_for_checkpoint(shards, prefix, {"scale": 0})
            return state

    folder = folder / str(kept)
    train(with_model(Scaled), layout=Layout(tensor=2), save_to=folder)
    saved = dist_checkpointing.load_tensors_metadata(str(folder / "weights"))
    return f"{saved['module.scale'].global_shape[0]} of 64 numbers"


def module_without_io(folder: Path) -> str:
    """A Lightning module without NeMo's `IOMixin`, when NeMo saves a checkpoint with context."""
    import lightning.pytorch as pl

    from megakit.training import megatron_adam
    from model_components import BionemoLightningModule, PretrainConfig

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.config = PretrainConfig()
            self.optim = megatron_adam(lr=1e-4)
            self.optim.connect(self)

        configure_model = BionemoLightningModule.configure_model
        forward = BionemoLightningModule.forward
        training_step = forward_step = BionemoLightningModule.training_step
        training_loss_reduction = BionemoLightningModule.training_loss_reduction
        loss_reduction_class = BionemoLightningModule.loss_reduction_class

    return error_of(lambda: fit(Module(), digits(), save_to=folder, with_context=True))


def saved_autoencoder(folder: Path) -> None:
    """Saves an autoencoder as NeMo does."""
    train(save_to=folder)


def classifier_of(folder: Path, skip: tuple[str, ...]) -> str:
    """Loads the weights of `saved_autoencoder` into the classifier."""
    from megakit.testing import distributed_model_parallel_state

    with distributed_model_parallel_state(accelerator="cpu"):
        from megakit.models import load_model_weights
        from model_components import ExampleFineTuneConfig

        model = ExampleFineTuneConfig().configure_model()
        result: list[str] = []
        error = error_of(lambda: result.extend(load_model_weights(model, folder, skip)))
    if not result:
        return error.replace(str(folder), "CHECKPOINT")
    return "not loaded: " + ", ".join(name for name in result if "extra_state" not in name)


def missing_weight(folder: Path) -> str:
    """Loads the classifier from `saved_autoencoder` by Megatron's own function.

    megakit's patch of the reader wraps the error in a `UserError`.
    """
    from megakit.testing import distributed_model_parallel_state

    with distributed_model_parallel_state(accelerator="cpu"):
        from megatron.core import dist_checkpointing

        from model_components import ExampleFineTuneConfig

        wanted = ExampleFineTuneConfig().configure_model().sharded_state_dict(prefix="module.")
        error = error_of(lambda: dist_checkpointing.load(wanted, str(folder / "weights")))
    return error[error.index("KeyError") :]
