"""Provides a text's bytes as training samples, by index, for the loops in `ladder/gpt`.

This module imports neither NeMo nor Lightning nor Megatron.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from megakit.job.option_types import INT32_MAX, BatchSize, Range, broken_rules


@dataclass(kw_only=True)
class GptOptions:
    """Train a small GPT for some steps; print the loss and the gradient's norm of each step."""

    text: Path = Path(__file__).resolve().parents[2] / "LICENSE"
    """A text file; by default this project's license, which is the same for everybody."""

    steps: Annotated[int, Range(least=2, most=INT32_MAX)] = 50
    """Optimizer steps to train for."""

    clip: Annotated[float, Range(above=0)] = 1.0
    """The largest norm of the gradient; a larger gradient is scaled to it."""

    batch_size: BatchSize = 8
    """Samples per optimizer step."""

    def problems(self) -> list[str]:
        """Returns one message per option with an invalid value."""
        problems = broken_rules(self)
        if not self.text.is_file() or self.text.stat().st_size < 1000:
            problems.append(f"--text {self.text}: has to be a file of at least 1,000 bytes.")
        return problems


class TextSamples:
    """Blocks of a text, in order; a token is a byte.

    `samples[a:b]` has the blocks from a up to b as two tensors, int64 (b - a, length): the tokens,
    and for each token the next one, which a model learns to predict. After the last whole block,
    the text begins again.

    Args:
        options: Which text.
        length: Tokens in a block.
    """

    def __init__(self, options: GptOptions, length: int) -> None:
        text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
        self.blocks = text.unfold(0, length + 1, length)  # the last token begins the next block

    def __getitem__(self, some: slice) -> tuple[Tensor, Tensor]:
        blocks = self.blocks[torch.arange(some.start, some.stop) % len(self.blocks)].long()
        return blocks[:, :-1], blocks[:, 1:]
