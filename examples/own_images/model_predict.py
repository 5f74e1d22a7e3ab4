"""Stage 2: classify each of your own test images exactly once."""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as in model_train.py

from examples.own_images.image_files import FolderOptions
from examples.own_images.model_train import TRAIN
from examples.vit.vit_sizes import SizeOptions
from megakit.job import CommonOptions, Run, Stage, run_script

PREDICT = Stage("predict", before=TRAIN)


@dataclass(kw_only=True)
class PredictOptions(FolderOptions, SizeOptions, CommonOptions):
    """Predict the class of every test image."""

    output_dir: Path = Path("runs/own_images")
    """Folder for runs."""

    checkpoint: str | None = None
    """Checkpoint of a classifier, or the folder of a training, for its best one; by default that
    of --output-dir."""


def predict(run: Run[PredictOptions]) -> Path:
    """Predicts the classes; returns the path of predictions.csv."""
    from examples.own_images.image_components import FolderDataModule
    from examples.vit.vit_components import VitClassifierConfig
    from model_components import BionemoLightningModule
    from model_trainer import build_trainer

    run.options.check_unchanged(run.dataset)
    data = FolderDataModule(
        run.options.data_dir,
        run.layout.micro_batch_size,
        run.layout.global_batch_size,
        num_workers=run.options.num_workers,
    )
    # The sizes and the number of classes come from the checkpoint.
    module = BionemoLightningModule(config=VitClassifierConfig(initial_ckpt_path=run.start))
    trainer = build_trainer(run)
    trainer.predict(module, data)
    return run.finish(trainer)


if __name__ == "__main__":
    run_script(PREDICT, PredictOptions, predict)
