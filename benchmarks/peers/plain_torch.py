"""The training as a plain loop in PyTorch: the limit for anything built on it."""

from typing import Any

import torch

from peers.job import CLIP, Clock, Job, optimizer_of


def train(job: Job, clock: Clock) -> None:
    """Trains; no logging, no validation, no saves."""
    device = torch.device("cuda" if job.device == "gpu" else "cpu")
    model = job.autoencoder().to(device)
    parameters = list(model.parameters())
    optimizer = optimizer_of(job, model)
    mixed = job.precision == "bf16-mixed"
    for step, batch in enumerate(job.batches()):
        x = job.flat(batch.to(device, non_blocking=True))
        for group in optimizer.param_groups:
            group["lr"] = job.lr * job.lr_factor(step)
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            x_hat = model(x)
        loss: Any = torch.nn.functional.mse_loss(x_hat.float(), x)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        clock.step(loss.item() if job.reads_loss(step) else None)
    clock.tell()
