"""Stage 1: pretrain a vision transformer to reconstruct masked patches of MNIST's images."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

# Python adds the folder of the script to sys.path; megakit and mnist are two folders above.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.vit.vit_sizes import SizeOptions
from megakit.job import Range, Run, Stage, TrainingOptions, run_script
from mnist.files import DataOptions

PRETRAIN = Stage("pretrain")


@dataclass(kw_only=True)
class PretrainOptions(DataOptions, SizeOptions, TrainingOptions):
    """Pretrain a vision transformer to reconstruct masked patches of each image."""

    output_dir: Path = Path("runs/vit")
    """Folder for runs."""

    max_steps: int = 400
    """Optimizer steps to train for."""

    lr: float = 3e-3
    """Peak learning rate, between a warm-up and a cosine decay to zero."""

    masked_share: Annotated[float, Range(least=0.1, most=0.9)] = 0.5
    """Share of each image's patches to mask; other random patches in each epoch."""


def pretrain(run: Run[PretrainOptions]) -> Path:
    """Trains the model; returns the path of the best checkpoint."""
    from examples.vit.vit_components import VitDataModule, VitPretrainConfig
    from megakit.training import cosine_annealing, megatron_adam, train
    from model_components import BionemoLightningModule
    from model_trainer import build_trainer

    options = run.options
    data = VitDataModule(
        options.data_dir,
        run.layout.micro_batch_size,
        dataset=run.dataset,
        global_batch_size=run.layout.global_batch_size,
        seed=options.seed,
        masked_share=options.masked_share,
        num_workers=options.num_workers,
    )
    module = BionemoLightningModule(
        config=VitPretrainConfig(seed=options.seed),
        optimizer=megatron_adam(options.lr, cosine_annealing(options.max_steps)),
    )
    trainer = build_trainer(run)
    train(model=module, data=data, trainer=trainer, resume=run.resume)
    return run.finish(trainer)


if __name__ == "__main__":
    run_script(PRETRAIN, PretrainOptions, pretrain)
