"""Generates tokens with a language model: in one process, or with all ranks of a job."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt import gpt_inference_wrapper
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)
from torch import Tensor

from examples.gpt.gpt_sizes import VOCABULARY


class NextLogits:
    """Computes the logits of the next token; Megatron's attention stores earlier keys and values.

    Args:
        model: A model of `load_for_inference`.
        batch_size: Number of texts, B.
    """

    def __init__(self, model: Any, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size
        self.block_size: int = model.config.block_size
        self.context = StaticInferenceContext(batch_size, self.block_size)

    def forget(self) -> None:
        """Removes all tokens; the next call begins at position 0."""
        self.context.reset()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Appends tokens, int64 (B, n); returns the logits, float32 (B, 256), of the next token."""
        start = self.context.sequence_len_offset
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        return self._run(tokens, positions.expand_as(tokens))[:, -1].float()

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, positions, inference_context=self.context)
        self.context.increment_sequence_len_offset(tokens.shape[1])
        return logits


class ParallelNextLogits(NextLogits):
    """Computes the logits on all ranks of a job, with each rank's part of the model."""

    def __init__(self, model: Any, batch_size: int) -> None:
        super().__init__(model, batch_size)
        self.dtype = next(model.parameters()).dtype  # the stages send activations of this type
        sizes = InferenceWrapperConfig(
            hidden_size=model.config.hidden_size,
            params_dtype=self.dtype,
            inference_batch_times_seqlen_threshold=-1,  # all texts in one micro batch
            padded_vocab_size=VOCABULARY,
        )
        # Megatron's wrapper sends the activations from stage to stage.
        self.wrapper = gpt_inference_wrapper.GPTInferenceWrapper(model, sizes, self.context)
        self.wrapper.prep_model_for_inference()

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        inputs = {"tokens": tokens, "position_ids": positions, "attention_mask": None}
        logits = self.wrapper.run_one_forward_step(inputs)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            if logits is None:  # this is not the last stage
                shape = (self.batch_size, 1, VOCABULARY)
                logits = torch.empty(shape, dtype=self.dtype, device=tokens.device)
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            group = parallel_state.get_pipeline_model_parallel_group()
            torch.distributed.broadcast(logits, src=last, group=group)
        return logits


def build_on_ranks(model: pl.LightningModule, trainer: pl.Trainer) -> torch.nn.Module:
    """Sets up the process groups, and returns this rank's part of the model, in evaluation mode.

    `trainer.predict` cannot be used, because it calls a model once for each sample.
    """
    strategy: Any = trainer.strategy
    strategy.connect(model)
    strategy.setup_environment()
    model.configure_model()
    strategy.trainer = trainer
    trainer.state.fn = TrainerFn.TESTING  # without gradients
    strategy.setup_megatron_parallel(trainer)
    part: torch.nn.Module = strategy.model[0].module
    return part.eval()


@torch.no_grad()
def generate(
    next_logits: NextLogits,
    prompt: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = VOCABULARY,
    seed: int = 42,
) -> Tensor:
    """Appends tokens to a prompt, int64 (B, n); if a block is full, forgets its first half.

    `temperature` divides the logits; 0 chooses the most probable token. `top_k` is the number of
    most probable tokens to choose from.
    """
    if not prompt.shape[1]:
        raise ValueError("the prompt is empty; the model needs at least one token.")
    generator = torch.Generator().manual_seed(seed)
    block_size = next_logits.block_size
    text, new = prompt, prompt[:, -block_size:]
    length = 0  # tokens that the model has seen
    next_logits.forget()
    for _ in range(num_tokens):
        if length + new.shape[1] > block_size:
            next_logits.forget()
            length, new = 0, text[:, -(block_size // 2) :]
        best = next_logits(new).cpu().topk(1 if temperature == 0 else top_k, dim=1)
        length += new.shape[1]
        probabilities = (best.values / (temperature or 1)).softmax(dim=1)
        choice = torch.multinomial(probabilities, 1, generator=generator)
        new = best.indices.gather(1, choice).to(text.device)
        text = torch.cat([text, new], dim=1)
    return text
