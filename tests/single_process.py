"""Megatron's parallel state, on a CPU, of a job with a single process: the one that runs the tests.

The CPU patches that this takes stay for the rest of the process. They change what CUDA's functions
mean and nothing else, so tests of data and files do not notice; tests marked `gpu` start a process
of their own.
"""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Sets up torch.distributed and Megatron, unless that was done, and takes them down again."""
    from megakit.runtime import use_accelerator

    use_accelerator("cpu")
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(42, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
