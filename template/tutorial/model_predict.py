"""Stage 3: classify every test image exactly once."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

if sys.flags.safe_path:  # with this flag, sys.path lacks the folder of the script
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from megakit.job import CommonOptions, Run, Stage, run_script
from mnist.files import DataOptions
from mnist.sizes import NUM_PARTS
from model_finetune import FINETUNE

PREDICT = Stage("predict", before=FINETUNE)


@dataclass(kw_only=True)
class PredictOptions(DataOptions, CommonOptions):
    """Predict the class of every test image."""

    num_layers: ClassVar[int] = NUM_PARTS

    checkpoint: str | None = None
    """Checkpoint of a classifier, or the folder of a fine-tuning, for its best one; by default that
    of --output-dir."""


def predict(run: Run[PredictOptions]) -> Path:
    """Predicts the classes; returns the path of predictions.csv."""
    from model_components import BionemoLightningModule, ExampleFineTuneConfig, MNISTDataModule
    from model_trainer import build_trainer

    data = MNISTDataModule(
        run.options.data_dir,
        run.layout.micro_batch_size,
        dataset=run.dataset,
        global_batch_size=run.layout.global_batch_size,
        num_workers=run.options.num_workers,
    )
    # No prefix is skipped: model and checkpoint must have the same weights.
    module = BionemoLightningModule(config=ExampleFineTuneConfig(initial_ckpt_path=run.start))
    trainer = build_trainer(run)
    trainer.predict(module, data)
    return run.finish(trainer)


if __name__ == "__main__":
    run_script(PREDICT, PredictOptions, predict)
