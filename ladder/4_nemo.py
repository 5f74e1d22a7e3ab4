"""Step 4: the same training with NeMo 2, which runs Megatron-Core in Lightning's Trainer."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for megakit and mnist

from megakit.job.command_line import parse_options
from megakit.models import seeded
from megakit.runtime import use_accelerator
from mnist.samples import LadderOptions, TrainingSamples

ACCELERATOR: Any = "gpu" if torch.cuda.is_available() else "cpu"
use_accelerator(ACCELERATOR)  # before the import of NeMo and Megatron

from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import ModelType
from nemo import lightning as nl
from nemo.lightning import AutoResume, NeMoLogger, io
from nemo.lightning.megatron_parallel import MegatronLossReduction
from nemo.lightning.pytorch.callbacks import ModelCheckpoint
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
from nemo.lightning.pytorch.plugins import MegatronDataSampler

SEED, LR = 42, 2e-3


@dataclass(kw_only=True)
class Options(LadderOptions):
    """Train the tutorial's autoencoder with NeMo 2, and print the loss of each step."""

    output_dir: Path | None = None
    """Folder for checkpoints and logs; a second start resumes. By default a temporary folder."""


class Samples(Dataset):
    def __init__(self, samples: TrainingSamples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        corrupted, images = self.samples[index : index + 1]
        return {"corrupted": corrupted[0], "images": images[0]}


class Data(pl.LightningDataModule):
    """Provides the samples in the order of their indices."""

    def __init__(self, samples: TrainingSamples, size: int) -> None:
        super().__init__()
        self.samples, self.size = samples, size
        # NeMo replaces the loader's sampler by this one, which divides a batch among the ranks.
        self.data_sampler = MegatronDataSampler(1, size, size)

    def train_dataloader(self) -> DataLoader:
        # Without these lines, a resumed training would begin again with the first sample.
        step = self.trainer.global_step if self.trainer else 0
        self.data_sampler.init_consumed_samples = step * self.size
        self.data_sampler.init_global_step = step
        return DataLoader(Samples(self.samples), batch_size=self.size)


class Loss(MegatronLossReduction):
    """Computes the loss of a micro batch, and the mean to log."""

    def forward(self, batch: dict[str, Tensor], output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = nn.functional.mse_loss(output.float(), batch["images"])
        return loss, {"avg": loss.detach().clone()}

    def reduce(self, losses_reduced_per_micro_batch: Any) -> Tensor:
        loss = torch.stack([report["avg"] for report in losses_reduced_per_micro_batch]).mean()
        group = parallel_state.get_data_parallel_group()
        torch.distributed.all_reduce(loss, group=group)
        return loss / group.size()


def linear(kind: type, config: TransformerConfig, name: str, inputs: int, outputs: int) -> Any:
    """Builds a sharded layer: each rank draws all weights of `nn.Linear`, and keeps its shard."""
    bound, column = inputs**-0.5, kind is ColumnParallelLinear
    options: Any = {"gather_output": False} if column else {"input_is_parallel": True}
    options |= {"config": config, "bias": True, "skip_bias_add": False}
    with seeded(SEED, name):
        layer = kind(inputs, outputs, init_method=lambda w: w.uniform_(-bound, bound), **options)
        bias = torch.empty(outputs).uniform_(-bound, bound)  # Megatron's bias is 0 at first
    shards = bias.chunk(outputs // len(layer.bias))  # one, if the bias is replicated
    layer.bias.data.copy_(shards[parallel_state.get_tensor_model_parallel_rank() % len(shards)])
    return layer


class Autoencoder(MegatronModule):
    """Has the encoder on the first pipeline stage, and the decoder on the last one."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        if self.pre_process:
            self.linear1 = linear(ColumnParallelLinear, config, "linear1", 784, 64)
            self.linear2 = linear(RowParallelLinear, config, "linear2", 64, 3)
        if self.post_process:
            self.linear3 = linear(ColumnParallelLinear, config, "linear3", 3, 64)
            self.linear4 = linear(RowParallelLinear, config, "linear4", 64, 784)

    def set_input_tensor(self, input_tensor: list[Tensor]) -> None:
        self.input_tensor = input_tensor[0]

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_process:
            z = self.linear2(self.linear1(x)[0].relu())[0]
        else:
            z = self.input_tensor.squeeze(0)
        if not self.post_process:
            return z.unsqueeze(0)
        return self.linear4(self.linear3(z)[0].relu())[0]


@dataclass
class Config(TransformerConfig, io.IOMixin):
    """Builds the model when the process groups exist."""

    num_layers: int = 1  # a multiple of the number of pipeline stages
    num_attention_heads: int = 1  # a multiple of the ranks of a layer
    hidden_size: int = 3  # the width of what stages exchange
    use_cpu_initialization: bool = True  # equal first weights on CPUs and GPUs

    def configure_model(self) -> Autoencoder:
        return Autoencoder(self)


class Module(pl.LightningModule, io.IOMixin):
    """Connects model, loss and optimizer with NeMo's strategy, which calls these methods."""

    def __init__(self, config: Config, steps: int) -> None:
        super().__init__()
        self.config = config
        adam = OptimizerConfig("adam", lr=LR, weight_decay=0.01, adam_beta2=0.98)
        warmup = max(1, round(0.1 * steps))
        scheduler = CosineAnnealingScheduler(steps, warmup, constant_steps=0, min_lr=0.0)
        self.optim = MegatronOptimizerModule(adam, scheduler)
        self.optim.connect(self)  # adds `configure_optimizers`

    def configure_model(self) -> None:
        self.module = self.config.configure_model()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int | None = None) -> Tensor:
        return self.module(batch["corrupted"])

    def training_loss_reduction(self) -> Loss:
        return Loss()

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        print(self.trainer.global_step, f"{outputs['loss']:.9f}", flush=True)


def main() -> None:
    options = parse_options(Options)
    folder = str(options.output_dir or tempfile.mkdtemp())
    samples = TrainingSamples(options, num_samples=options.steps * options.batch_size, seed=SEED)
    trainer = nl.Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        max_steps=options.steps,
        limit_val_batches=0,
        strategy=nl.MegatronStrategy(
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            ckpt_async_save=False,  # in the background, saves that overlap are torn
        ),
        plugins=nl.MegatronMixedPrecision(options.precision),
        enable_progress_bar=False,
    )
    checkpoints = ModelCheckpoint(
        monitor="reduced_train_loss", every_n_train_steps=25, save_optim_on_train_end=True
    )
    module = Module(Config(), options.steps)
    NeMoLogger(log_dir=folder, name="ladder", ckpt=checkpoints).setup(
        trainer, resume_if_exists=True
    )
    resume = AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    resume.setup(trainer, module)
    trainer.fit(module, Data(samples, options.batch_size))


if __name__ == "__main__":
    main()
