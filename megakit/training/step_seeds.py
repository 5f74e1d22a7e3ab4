"""Makes random numbers exact after a resumption: generators are seeded by seed and step."""

import hashlib

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed


def seed_generators(seed: int, step: int) -> None:
    """Seeds this rank's generators from a seed and the number of completed steps."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    data_rank = parallel_state.get_data_parallel_rank()
    digest = hashlib.sha256(f"{seed}/{step}/{stage}/{data_rank}".encode()).digest()
    # The CPU's generator uses 32 bits of the seed, and Megatron adds small numbers to it.
    step_seed = int.from_bytes(digest[:4], "little")
    torch.default_generator.manual_seed(step_seed)
    model_parallel_cuda_manual_seed(step_seed)
