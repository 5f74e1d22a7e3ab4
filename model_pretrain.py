"""Stage 1: pretrain an autoencoder on MNIST. Stage 2 starts from its encoder, the trunk."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if sys.flags.safe_path:  # with this flag, sys.path lacks the folder of the script
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from megakit.job import BatchSize, Range, Run, Stage, TrainingOptions, run_script
from mnist.files import DataOptions
from mnist.sizes import SizeOptions

PRETRAIN = Stage("pretrain")


@dataclass(kw_only=True)
class PretrainOptions(DataOptions, SizeOptions, TrainingOptions):
    """Pretrain an autoencoder that encodes digits as small latent vectors and decodes them."""

    max_steps: int = 500
    """Optimizer steps to train for."""

    global_batch_size: BatchSize = 128
    """Samples per optimizer step over all ranks, the same for every layout. Larger batches
    reconstruct better, but take longer."""

    lr: float = 2e-3
    """Peak learning rate, between a warm-up and a cosine decay to zero. A higher rate reconstructs
    better, but fine-tuning then separates the digits worse."""

    corruption: Annotated[float, Range(least=0, below=1)] = 0.2
    """Share of each training image's pixels to set to 0. Each epoch draws other pixels."""


def pretrain(run: Run[PretrainOptions]) -> Path:
    """Trains the autoencoder; returns the path of the best checkpoint."""
    # These imports are slow. They are not at the top, so that --help is fast.
    from megakit.training import cosine_annealing, megatron_adam, train
    from mnist.views import LogPictures, view_of_autoencoder
    from model_components import BionemoLightningModule, MNISTDataModule, PretrainConfig
    from model_trainer import build_trainer

    options = run.options
    data = MNISTDataModule(
        options.data_dir,
        run.layout.micro_batch_size,
        dataset=run.dataset,
        global_batch_size=run.layout.global_batch_size,
        seed=options.seed,
        corruption=options.corruption,
        num_workers=options.num_workers,
    )
    module = BionemoLightningModule(
        config=PretrainConfig(
            seed=options.seed, hidden_size=options.hidden_size, latent_size=options.latent_size
        ),
        optimizer=megatron_adam(options.lr, cosine_annealing(options.max_steps)),
    )
    trainer = build_trainer(run, callbacks=[LogPictures(view_of_autoencoder)])
    train(model=module, data=data, trainer=trainer, resume=run.resume)
    return run.finish(trainer, next_verb="finetune")


if __name__ == "__main__":
    run_script(PRETRAIN, PretrainOptions, pretrain)
