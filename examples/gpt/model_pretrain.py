"""Stage 1: train a language model on the bytes of text files."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

# Python adds the folder of the script to sys.path; megakit is two folders above.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.gpt.gpt_sizes import SizeOptions, vocabulary_problems
from examples.gpt.text_files import TextOptions
from megakit.job import (
    BatchSize,
    Count,
    LearningRate,
    Range,
    Run,
    Stage,
    TrainingOptions,
    run_script,
)

PRETRAIN = Stage("pretrain")


@dataclass(kw_only=True)
class PretrainOptions(TextOptions, SizeOptions, TrainingOptions):
    """Train a language model to predict the next byte of a text."""

    output_dir: Path = Path("runs/gpt")
    """Folder for runs."""

    max_steps: Count = 1200
    """Optimizer steps to train for."""

    global_batch_size: BatchSize = 16
    """Blocks per optimizer step over all ranks, the same for every layout."""

    lr: LearningRate = 2e-3
    """Peak learning rate, between a warm-up and a cosine decay to zero."""

    val_interval: Count = 400
    """Validate every N steps, and after the last step."""

    save_interval: Count = 400
    """Save a checkpoint every N steps, and after the last step. The best checkpoint is that of a
    validated step."""

    dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    """Share of the activations that training sets to 0 at random."""

    recompute: bool = False
    """Compute the activations of the layers again in the backward pass, instead of keeping them in
    memory."""

    sequence_parallel: bool = False
    """Also shard the activations of normalization and dropout over the tensor-parallel ranks."""

    distributed_optimizer: bool = False
    """Shard the optimizer's state over the data-parallel ranks."""

    #: These options change the memory. Like the layout, they change a result by rounding only, or
    #: with dropout by the random masks.
    resumable_options = TrainingOptions.resumable_options | {"recompute", "sequence_parallel"}

    def problems(self) -> list[str]:
        """Returns the problems of the options, one message each."""
        found = super().problems()
        width, heads, ranks = self.hidden_size, self.num_attention_heads, self.tensor_parallel
        found += vocabulary_problems(ranks)
        if heads >= 1 and width % heads:
            found.append(
                f"--hidden-size {width}: has to be a multiple of --num-attention-heads {heads}. "
                f"Try {-(-width // heads) * heads}."
            )
        if self.sequence_parallel and ranks == 1:
            found.append(
                "--sequence-parallel: needs tensor-parallel ranks. Add for example --devices 2 "
                "--tensor-parallel 2, or leave the option out."
            )
        elif self.sequence_parallel and ranks > 1 and self.block_size % ranks:
            found.append(
                f"--block-size {self.block_size}: with --sequence-parallel, --tensor-parallel "
                f"{ranks} has to divide it. Try {-(-self.block_size // ranks) * ranks}."
            )
        return found


def pretrain(run: Run[PretrainOptions]) -> Path:
    """Trains the model; returns the path of the best checkpoint."""
    from examples.gpt.gpt_components import GptConfig, GptModule, TextDataModule, build_trainer
    from megakit.training import cosine_annealing, megatron_adam, train

    options = run.options
    options.check_unchanged(run.dataset)
    data = TextDataModule(
        options.text,
        options.block_size,
        run.layout.micro_batch_size,
        run.layout.global_batch_size,
        seed=options.seed,
        num_workers=options.num_workers,
    )
    module = GptModule(
        config=GptConfig(
            seed=options.seed,
            num_layers=options.num_layers,
            hidden_size=options.hidden_size,
            num_attention_heads=options.num_attention_heads,
            block_size=options.block_size,
            hidden_dropout=options.dropout,
            attention_dropout=options.dropout,
            recompute_granularity="full" if options.recompute else None,
            recompute_method="uniform" if options.recompute else None,
            recompute_num_layers=1 if options.recompute else None,
        ),
        optimizer=megatron_adam(options.lr, cosine_annealing(options.max_steps)),
    )
    trainer = build_trainer(
        run,
        sequence_parallel=options.sequence_parallel,
        distributed_optimizer=options.distributed_optimizer,
    )
    train(model=module, data=data, trainer=trainer, resume=run.resume)
    return run.finish(trainer)


if __name__ == "__main__":
    run_script(PRETRAIN, PretrainOptions, pretrain)
