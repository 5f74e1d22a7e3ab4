"""Stage 2: add a classification head to the pretrained transformer, and train both."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as in model_pretrain.py

from examples.vit.model_pretrain import PRETRAIN
from examples.vit.vit_sizes import SizeOptions
from megakit.job import Range, Run, Stage, TrainingOptions, run_script
from mnist.files import DataOptions

FINETUNE = Stage("finetune", before=PRETRAIN)


@dataclass(kw_only=True)
class FinetuneOptions(DataOptions, SizeOptions, TrainingOptions):
    """Fine-tune the pretrained transformer as a digit classifier."""

    output_dir: Path = Path("runs/vit")
    """Folder for runs."""

    checkpoint: str | None = None
    """Checkpoint to start from, or the folder of a pretraining, for its best one; by default that
    of --output-dir. none: start from random weights."""

    max_steps: int = 1600
    """Optimizer steps to train for."""

    lr: float = 3e-3
    """Peak learning rate, between a warm-up and a cosine decay to zero."""

    shift: Annotated[int, Range(least=0, most=27)] = 2
    """Largest random shift of training images in pixels; shifts differ between epochs."""

    num_labels: Annotated[int | None, Range(least=10)] = None
    """Train on N labelled images, balanced over the classes; by default on all. With N, the last
    checkpoint is used, because choosing by validation would need more labels."""

    def selects_by(self) -> str:
        """Returns what selects the best checkpoint: a column of metrics.csv, or `last`."""
        return self.best_by if self.num_labels is None else "last"


def finetune(run: Run[FinetuneOptions]) -> Path:
    """Trains the classifier; returns the path of the best checkpoint."""
    from examples.vit.vit_components import VitClassifierConfig, VitDataModule
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
        shift=options.shift,
        num_labels=options.num_labels,
        num_workers=options.num_workers,
    )
    module = BionemoLightningModule(
        config=VitClassifierConfig(
            seed=options.seed,
            initial_ckpt_path=run.start,
            # The pretrained model has no head, so the head starts from random weights.
            initial_ckpt_skip_keys_with_these_prefixes={"head"},
        ),
        optimizer=megatron_adam(options.lr, cosine_annealing(options.max_steps)),
    )
    trainer = build_trainer(run)
    train(model=module, data=data, trainer=trainer, resume=run.resume)
    return run.finish(trainer)


if __name__ == "__main__":
    run_script(FINETUNE, FinetuneOptions, finetune)
