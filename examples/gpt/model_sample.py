"""Stage 2: continue a text with the trained model."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as in model_pretrain.py

from examples.gpt.gpt_sizes import vocabulary_problems
from examples.gpt.model_pretrain import PRETRAIN
from megakit.errors import printable
from megakit.job import CommonOptions, Count, Range, Run, Seed, Stage, run_script
from megakit.runtime.atomic_files import write_atomically

SAMPLE = Stage("sample", before=PRETRAIN)


@dataclass(kw_only=True)
class SampleOptions(CommonOptions):
    """Continue a text with a language model."""

    output_dir: Path = Path("runs/gpt")
    """Folder for runs."""

    checkpoint: str | None = None
    """Checkpoint of a language model, or the folder of a pretraining, for its best one; by default
    that of --output-dir."""

    prompt: str = "import "
    """The beginning of the text."""

    num_bytes: Count = 500
    """Bytes to append."""

    temperature: Annotated[float, Range(least=0, most=100)] = 0.7
    """Divides the logits: lower values choose more probable bytes. 0 always chooses the most
    probable one."""

    top_k: Annotated[int, Range(least=1, most=256)] = 50
    """Choose from the K most probable bytes."""

    seed: Seed = 42
    """Seed of the random choices."""

    #: The checkpoint decides these sizes, which the layout has to divide.
    num_attention_heads: ClassVar[None] = None
    num_layers: ClassVar[None] = None

    def fingerprint(self) -> str:
        """Returns a name for the console; sampling reads no data."""
        return self.start_dataset or "text"

    def problems(self) -> list[str]:
        """Returns the problems of the options, one message each."""
        found = super().problems() + vocabulary_problems(self.tensor_parallel)
        if self.devices and self.devices > self.tensor_parallel * self.pipeline_parallel:
            found.append(
                f"--devices {self.devices}: data-parallel ranks would all generate the same text. "
                f"Use --devices {self.tensor_parallel * self.pipeline_parallel}."
            )
        return found


def sample(run: Run[SampleOptions]) -> Path:
    """Generates the text; returns the path of the file that contains it."""
    import torch

    from examples.gpt.gpt_components import GptConfig, GptModule, build_trainer
    from examples.gpt.sampling import ParallelNextLogits, build_on_ranks, generate

    options = run.options
    module = GptModule(config=GptConfig(initial_ckpt_path=run.start))
    trainer = build_trainer(run)
    model = build_on_ranks(module, trainer)
    prompt = torch.tensor([list(os.fsencode(options.prompt))], device=trainer.strategy.root_device)
    tokens = generate(
        ParallelNextLogits(model, batch_size=1),
        prompt,
        options.num_bytes,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    text = bytes(tokens[0].tolist())
    path = run.path / "sample.txt"
    if run.is_main:
        write_atomically(path, text)
        # The text may contain control sequences for the terminal.
        lines = text.decode("utf-8", "replace").expandtabs(4).split("\n")
        run.console.say("\n".join(map(printable, lines)))
    return path


if __name__ == "__main__":
    run_script(SAMPLE, SampleOptions, sample)
