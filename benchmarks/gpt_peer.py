"""One training of the language model, in this process; prints its figures as a line of JSON.

python benchmarks/gpt_peer.py {ours,torch} [--steps N] [...]
"""

import functools
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.job import CLIP, Clock, Job, optimizer_of
from peers.ours import log_every_step

from examples.gpt.gpt_sizes import SizeOptions
from megakit.job import Run, run_script


@dataclass(kw_only=True)
class GptJob(Job, SizeOptions):
    """One training; both peers are asked for the same one."""

    text: Path | None = None
    """A file or a folder; by default the standard library."""

    hidden_size: int = SizeOptions.hidden_size
    """Width of the layers."""

    batch_size: int = 16
    """Blocks per step: one micro batch, one global batch."""

    lr: float = 2e-3
    """Peak learning rate."""

    warm_up: int = 20
    """Steps before the clock starts."""


def train_ours(job: GptJob, clock: Clock) -> None:
    """`examples/gpt/model_pretrain.py` as a user starts it; does not return."""
    from examples.gpt import model_pretrain

    options: dict[str, Any] = {
        "output-dir": tempfile.mkdtemp(prefix="megakit-peer-"),
        "accelerator": job.device,
        "max-steps": job.steps,
        "global-batch-size": job.batch_size,
        "micro-batch-size": job.batch_size,
        "precision": job.precision,
        "lr": job.lr,
        "seed": job.seed,
        "num-layers": job.num_layers,
        "hidden-size": job.hidden_size,
        "num-attention-heads": job.num_attention_heads,
        "block-size": job.block_size,
        "val-interval": job.steps,
        "save-interval": job.steps,
    } | ({} if job.text is None else {"text": job.text})
    sys.argv[1:] = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    run_script(
        model_pretrain.PRETRAIN,
        model_pretrain.PretrainOptions,
        functools.partial(timed, job=job, clock=clock),
    )


def timed(run: Run[Any], job: GptJob, clock: Clock) -> Path:
    """What the script does, with a clock that looks at each step's end."""
    from lightning.pytorch import Trainer

    from examples.gpt import gpt_components, model_pretrain
    from megakit.reporting.metrics import read_metrics
    from megakit.training import progress

    callback: Any = progress.Reporter
    original = callback.on_train_batch_end

    def on_train_batch_end(self: Any, trainer: Trainer, *args: Any) -> None:
        original(self, trainer, *args)
        clock.step()

    callback.on_train_batch_end = on_train_batch_end
    if job.every_loss:
        log_every_step(gpt_components)
    checkpoint = model_pretrain.pretrain(run)
    rows = read_metrics(run.path / "metrics.csv")
    if job.every_loss:
        clock.losses = [row.train_loss for row in rows if row.train_loss is not None]
    clock.tell(val_loss=rows[-1].val_loss)
    shutil.rmtree(run.options.output_dir)
    return checkpoint


def train_torch(job: GptJob, clock: Clock) -> None:
    """The same training as a plain loop in PyTorch, from the same weights and samples."""
    from megakit.runtime import use_accelerator

    use_accelerator(job.device)
    import numpy as np
    import torch
    from peers.plain_gpt import plain_gpt

    from examples.gpt.gpt_components import GptConfig, TextBlocks
    from examples.gpt.text_files import read_splits
    from megakit.data import IdentityMultiEpochDatasetWrapper, MultiEpochDatasetResampler
    from megakit.models.inference import single_rank_state

    sizes = {name: getattr(job, name) for name in SizeOptions.__dataclass_fields__}
    config = GptConfig(seed=job.seed, **sizes)
    with single_rank_state():
        weights = config.configure_model().state_dict()
    device = torch.device("cuda" if job.device == "gpu" else "cpu")
    model = plain_gpt(config, weights).to(device)
    training, validation = (TextBlocks(text, job.block_size) for text in read_splits(job.text))
    samples = MultiEpochDatasetResampler(
        IdentityMultiEpochDatasetWrapper(training), None, job.steps * job.batch_size, seed=job.seed
    )
    optimizer = optimizer_of(job, model)
    mixed = job.precision == "bf16-mixed"

    def summed_loss(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum over all tokens but the padding of a last block, and their number."""
        tokens, labels = (batch[name].to(device) for name in ("tokens", "labels"))
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            logits = model(tokens)
        losses = torch.nn.functional.cross_entropy(
            logits.float().view(-1, 256), labels.view(-1), reduction="none"
        )
        mask = batch["loss_mask"].to(device).view(-1)
        return (losses * mask).sum(), mask.sum()

    for step in range(job.steps):
        first = step * job.batch_size
        for group in optimizer.param_groups:
            group["lr"] = job.lr * job.lr_factor(step)
        total, count = summed_loss(samples.get_batch(np.arange(first, first + job.batch_size)))
        loss: Any = total / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        clock.step(loss.item() if job.reads_loss(step) else None)
    sums = []
    with torch.no_grad():
        for first in range(0, len(validation), job.batch_size):
            stop = min(first + job.batch_size, len(validation))
            sums.append(summed_loss(validation.get_batch(np.arange(first, stop))))
    val_total, val_count = (
        sum(float(each) for each in column) for column in zip(*sums, strict=True)
    )
    clock.tell(val_loss=val_total / val_count)


def main() -> None:
    from megakit.job.command_line import parse_options

    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name not in ("ours", "torch"):
        sys.exit(__doc__)
    job = parse_options(GptJob)
    (train_ours if name == "ours" else train_torch)(job, Clock(job))


if __name__ == "__main__":
    main()
