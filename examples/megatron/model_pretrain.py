"""Stage 1: pretrain an autoencoder on MNIST. Stage 2 starts from its encoder, the trunk."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

# Python adds the folder of this file; the modules of the tutorial are two folders above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megakit.job import BatchSize, Range, Run, Stage, TrainingOptions, run_script
from mnist.files import DataOptions
from mnist.sizes import SizeOptions

PRETRAIN = Stage("pretrain")


@dataclass(kw_only=True)
class PretrainOptions(DataOptions, SizeOptions, TrainingOptions):
    """Pretrain an autoencoder that encodes digits as small latent vectors and decodes them."""

    output_dir: Path = Path("runs/megatron")
    """Folder that contains the runs."""

    max_steps: int = 500
    """Optimizer steps to train for."""

    global_batch_size: BatchSize = 128
    """Samples per optimizer step over all ranks, the same for every layout."""

    lr: float = 2e-3
    """Peak learning rate, between a warm-up and a cosine decay to zero."""

    corruption: Annotated[float, Range(least=0, below=1)] = 0.2
    """Share of each training image's pixels to set to 0. Each epoch draws other pixels."""

    distributed_optimizer: bool = False
    """Share Adam's states among the data-parallel ranks."""


def pretrain(run: Run[PretrainOptions]) -> Path:
    """Trains the autoencoder; returns the path of the best checkpoint."""
    # These imports are slow. They are not at the top, so that --help is fast.
    from examples.megatron.model_components import (
        Autoencoder,
        all_epochs,
        model_config,
        reconstruct,
        wrap,
    )
    from examples.megatron.training_loop import Training, start_process_groups
    from mnist.dataset import MNISTCustom
    from mnist.files import read_splits

    options = run.options
    start_process_groups(run)
    train, validation, _ = read_splits(
        options.data_dir or Path("data"), run.dataset, MNISTCustom.from_arrays
    )
    sizes = {"hidden_size": options.hidden_size, "latent_size": options.latent_size}
    training = Training(
        run,
        wrap(
            Autoencoder(model_config(run, **sizes)),
            options.lr,
            options.max_steps,
            use_distributed_optimizer=options.distributed_optimizer,
        ),
        reconstruct,
        all_epochs(train, run, options.corruption),
        validation,
        settings=sizes,
        better={"loss": min},
    )
    return training.run_to_the_end(next_verb="finetune")


if __name__ == "__main__":
    run_script(PRETRAIN, PretrainOptions, pretrain, uses_nemo=False)
