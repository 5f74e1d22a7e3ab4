"""Stage 2: add a classification head to the pretrained trunk, and train both."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if sys.flags.safe_path:  # with this flag, sys.path lacks the folder of the script
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from megakit.job import Range, Run, Stage, TrainingOptions, run_script
from mnist.files import DataOptions
from mnist.sizes import SizeOptions
from model_pretrain import PRETRAIN

FINETUNE = Stage("finetune", before=PRETRAIN)


@dataclass(kw_only=True)
class FinetuneOptions(DataOptions, SizeOptions, TrainingOptions):
    """Fine-tune the pretrained trunk as a digit classifier."""

    checkpoint: str | None = None
    """Checkpoint to start from, or the folder of a pretraining, for its best one; by default that
    of --output-dir. none: start from random weights."""

    max_steps: int = 1500
    """Optimizer steps to train for."""

    lr: float = 6e-2
    """Peak learning rate, between a warm-up and a cosine decay to zero. The rate is high, because
    the classes separate in a few latent numbers only if the trunk's weights change a lot."""

    num_labels: Annotated[int | None, Range(least=10)] = None
    """Train on N labelled images, balanced over the classes; by default on all. With N, the last
    checkpoint is used, because choosing by validation would need more labels."""

    def selects_by(self) -> str:
        """Returns what selects the best checkpoint: a column of metrics.csv, or `last`."""
        return self.best_by if self.num_labels is None else "last"


def finetune(run: Run[FinetuneOptions]) -> Path:
    """Trains the classifier; returns the path of the best checkpoint."""
    from megakit.training import cosine_annealing, megatron_adam, train
    from mnist.views import LogPictures, view_of_classifier
    from model_components import BionemoLightningModule, ExampleFineTuneConfig, MNISTDataModule
    from model_trainer import build_trainer

    options = run.options
    data = MNISTDataModule(
        options.data_dir,
        run.layout.micro_batch_size,
        dataset=run.dataset,
        global_batch_size=run.layout.global_batch_size,
        seed=options.seed,
        num_labels=options.num_labels,
        num_workers=options.num_workers,
    )
    module = BionemoLightningModule(
        config=ExampleFineTuneConfig(
            seed=options.seed,
            hidden_size=options.hidden_size,
            latent_size=options.latent_size,
            initial_ckpt_path=run.start,
            # The pretrained model has no head, so the head starts from random weights.
            initial_ckpt_skip_keys_with_these_prefixes={"digit_classifier"},
        ),
        # At this high learning rate, a longer warm-up and a shorter momentum than in pretraining
        # increase the accuracy.
        optimizer=megatron_adam(
            options.lr, cosine_annealing(options.max_steps, warmup_share=0.3), beta1=0.7
        ),
    )
    trainer = build_trainer(run, callbacks=[LogPictures(view_of_classifier)])
    train(model=module, data=data, trainer=trainer, resume=run.resume)
    return run.finish(trainer, next_verb="predict")


if __name__ == "__main__":
    run_script(FINETUNE, FinetuneOptions, finetune)
