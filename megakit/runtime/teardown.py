"""Taking down what a job set up, so that another can begin in the same process."""

import sys


def destroy_parallel_state() -> None:
    """Takes down what a job left behind in this process, NeMo's trainer included."""
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

        AppState().__init__()  # a singleton: this empties it
    if dist.is_initialized():
        dist.destroy_process_group()
