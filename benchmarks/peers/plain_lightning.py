"""The training in plain Lightning, with all that slows it down turned off."""

from typing import Any

import lightning.pytorch as pl
import torch

from peers.job import CLIP, Clock, Job, optimizer_of


class Autoencoder(pl.LightningModule):
    """The model with its loss, optimizer and schedule."""

    def __init__(self, job: Job, clock: Clock) -> None:
        super().__init__()
        self.job, self.clock = job, clock
        self.model = job.autoencoder()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        x = self.job.flat(batch)
        return torch.nn.functional.mse_loss(self.model(x).float(), x)

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.job, self.model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.job.lr_factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        # Lightning's own refuses a fused optimizer under mixed precision, which needs care with
        # float16's loss scale alone.
        torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.step(outputs["loss"].item() if self.job.reads_loss(batch_idx) else None)


def train(job: Job, clock: Clock) -> None:
    """Trains; no logging, no validation, no saves."""
    trainer = pl.Trainer(
        accelerator=job.device,
        devices=1,
        precision="bf16-mixed" if job.precision == "bf16-mixed" else "32-true",
        max_steps=job.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Autoencoder(job, clock), job.batches())
    clock.tell()
