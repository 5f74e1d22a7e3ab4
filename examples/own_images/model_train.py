"""Stage 1: train a vision transformer on your own images."""

import sys
from dataclasses import dataclass
from pathlib import Path

# Python adds the folder of the script to sys.path; megakit and mnist are two folders above.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.own_images.image_files import FolderOptions, list_classes
from examples.vit.vit_sizes import SizeOptions
from megakit.job import Run, Stage, TrainingOptions, run_script

TRAIN = Stage("train")


@dataclass(kw_only=True)
class TrainOptions(FolderOptions, SizeOptions, TrainingOptions):
    """Train an image classifier on one folder of images per class."""

    output_dir: Path = Path("runs/own_images")
    """Folder for runs."""

    max_steps: int = 600
    """Optimizer steps to train for."""

    global_batch_size: int = 128
    """Samples per optimizer step over all ranks; independent of the layout."""

    lr: float = 3e-3
    """Peak learning rate, between a warm-up and a cosine decay to zero."""


def train_classifier(run: Run[TrainOptions]) -> Path:
    """Trains the classifier; returns the path of the best checkpoint."""
    from examples.own_images.image_components import FolderDataModule
    from examples.own_images.image_dataset import CHANNELS, SIZE
    from examples.vit.vit_components import VitClassifierConfig
    from megakit.training import cosine_annealing, megatron_adam, train
    from model_components import BionemoLightningModule
    from model_trainer import build_trainer

    options = run.options
    options.check_unchanged(run.dataset)
    data = FolderDataModule(
        options.data_dir,
        run.layout.micro_batch_size,
        run.layout.global_batch_size,
        seed=options.seed,
        num_workers=options.num_workers,
    )
    module = BionemoLightningModule(
        config=VitClassifierConfig(
            seed=options.seed,
            image_size=SIZE,
            channels=CHANNELS,
            patch_size=8,
            num_classes=len(list_classes(options.data_dir / "train")),
        ),
        optimizer=megatron_adam(options.lr, cosine_annealing(options.max_steps)),
    )
    trainer = build_trainer(run)
    train(model=module, data=data, trainer=trainer, resume=run.resume)
    return run.finish(trainer)


if __name__ == "__main__":
    run_script(TRAIN, TrainOptions, train_classifier)
