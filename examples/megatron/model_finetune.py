"""Stage 2: add a classification head to the pretrained trunk, and train both."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

# Python adds the folder of this file; the modules of the tutorial are two folders above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.megatron.model_pretrain import PRETRAIN
from megakit.job import Range, Run, Stage, TrainingOptions, run_script
from mnist.files import DataOptions
from mnist.sizes import SizeOptions

FINETUNE = Stage("finetune", before=PRETRAIN)


@dataclass(kw_only=True)
class FinetuneOptions(DataOptions, SizeOptions, TrainingOptions):
    """Fine-tune the pretrained trunk as a digit classifier."""

    output_dir: Path = Path("runs/megatron")
    """Folder that contains the runs."""

    checkpoint: str | None = None
    """Checkpoint to start from, or the folder of a pretraining, for its best one; by default that
    of --output-dir. A checkpoint of the tutorial with NeMo will do, too. none: start from random
    weights."""

    max_steps: int = 1500
    """Optimizer steps to train for."""

    lr: float = 6e-2
    """Peak learning rate, between a warm-up and a cosine decay to zero. The rate is high, because
    the classes separate in a few latent numbers only if the trunk's weights change a lot."""

    num_labels: Annotated[int | None, Range(least=10)] = None
    """Train on N labelled images, balanced over the classes; by default on all. With N, the last
    checkpoint is used, because choosing by validation would need more labels."""

    distributed_optimizer: bool = False
    """Share Adam's states among the data-parallel ranks."""

    def selects_by(self) -> str:
        """Returns what selects the best checkpoint: a column of metrics.csv, or `last`."""
        return self.best_by if self.num_labels is None else "last"


def finetune(run: Run[FinetuneOptions]) -> Path:
    """Trains the classifier; returns the path of the best checkpoint."""
    from examples.megatron.model_components import (
        Classifier,
        all_epochs,
        classify,
        model_config,
        wrap,
    )
    from examples.megatron.training_loop import Training, start_process_groups
    from megakit.data import balanced_subset
    from megakit.models import load_model_weights
    from mnist.dataset import MNISTCustom
    from mnist.files import read_splits

    options = run.options
    start_process_groups(run)
    train, validation, _ = read_splits(
        options.data_dir or Path("data"), run.dataset, MNISTCustom.from_arrays
    )
    if options.num_labels is not None:
        train = balanced_subset(train, options.num_labels, options.seed)
    sizes = {"hidden_size": options.hidden_size, "latent_size": options.latent_size}
    model = Classifier(model_config(run, **sizes))
    if run.start:  # the pretrained model has no head, so the head starts from random weights
        load_model_weights(model, Path(run.start), skip={"digit_classifier"})
    training = Training(
        run,
        # At this high learning rate, a longer warm-up and a shorter momentum than in pretraining
        # increase the accuracy.
        wrap(
            model,
            options.lr,
            options.max_steps,
            warmup_share=0.3,
            beta1=0.7,
            use_distributed_optimizer=options.distributed_optimizer,
        ),
        classify,
        all_epochs(train, run),
        validation,
        settings=sizes,
        better={"loss": min, "accuracy": max},
    )
    return training.run_to_the_end(next_verb="predict")


if __name__ == "__main__":
    run_script(FINETUNE, FinetuneOptions, finetune, uses_nemo=False)
