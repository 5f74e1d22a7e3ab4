"""Stage 3: classify every test image exactly once."""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as in model_pretrain.py

from examples.vit.model_finetune import FINETUNE
from examples.vit.vit_sizes import SizeOptions
from megakit.job import CommonOptions, Run, Stage, run_script
from mnist.files import DataOptions

PREDICT = Stage("predict", before=FINETUNE)


@dataclass(kw_only=True)
class PredictOptions(DataOptions, SizeOptions, CommonOptions):
    """Predict the digit on every test image."""

    output_dir: Path = Path("runs/vit")
    """Folder for runs."""

    checkpoint: str | None = None
    """Checkpoint of a classifier, or the folder of a fine-tuning, for its best one; by default that
    of --output-dir."""


def predict(run: Run[PredictOptions]) -> Path:
    """Predicts the digits; returns the path of predictions.csv."""
    from examples.vit.vit_components import VitClassifierConfig, VitDataModule
    from model_components import BionemoLightningModule
    from model_trainer import build_trainer

    data = VitDataModule(
        run.options.data_dir,
        run.layout.micro_batch_size,
        dataset=run.dataset,
        global_batch_size=run.layout.global_batch_size,
        num_workers=run.options.num_workers,
    )
    # No prefix is skipped: model and checkpoint must have the same weights.
    module = BionemoLightningModule(config=VitClassifierConfig(initial_ckpt_path=run.start))
    trainer = build_trainer(run)
    trainer.predict(module, data)
    return run.finish(trainer)


if __name__ == "__main__":
    run_script(PREDICT, PredictOptions, predict)
