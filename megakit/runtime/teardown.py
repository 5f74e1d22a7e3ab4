"""Removes the global state of a job, so that another job can start in the same process."""

import sys


def destroy_parallel_state() -> None:
    """Destroys the process groups and global state that a job or NeMo's trainer left."""
    import torch.distributed as dist

    if "megatron.core.parallel_state" in sys.modules:
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        parallel_state.destroy_model_parallel()
        destroy_num_microbatches_calculator()
        get_cuda_rng_tracker().reset()
    if "nemo.utils.app_state" in sys.modules:
        from nemo.utils.app_state import AppState

        AppState().__init__()  # resets the singleton
    if dist.is_initialized():
        dist.destroy_process_group()
