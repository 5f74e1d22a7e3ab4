"""Makes one process a rank of a large job, without the other ranks.

torch's backend `fake` creates the process groups of any number of ranks in one process. Its
collectives return at once and exchange no data. So Megatron builds this rank's share of a model
with the real shapes, but the results of collectives are wrong.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from megakit.runtime.accelerator import AcceleratorName
from megakit.testing.parallel_state import distributed_model_parallel_state


@contextlib.contextmanager
def fake_ranks(
    rank: int = 0,
    world_size: int = 8,
    *,
    seed: int = 42,
    accelerator: AcceleratorName = "auto",
    **sizes: Any,
) -> Iterator[None]:
    """Sets up Megatron's parallel state as on one rank of a large job, and removes it at the end.

    Inside the block, models are built as on this rank: shapes, parameters and bytes. Collectives
    exchange no data, so do not use their results. A job of 1,024 ranks is set up in under a second.
    A real job may follow in the same process.

    Args:
        rank: Number of the rank, from 0.
        world_size: Number of ranks of the job.
        seed: Seed of Megatron's random-number tracker, from which dropout draws.
        accelerator: See `distributed_model_parallel_state`.
        **sizes: Arguments of Megatron's `initialize_model_parallel`, such as
            `tensor_model_parallel_size=2`; the remaining ranks are data parallel.

    Raises:
        RuntimeError: torch.distributed is set up already, or the sizes do not fit the number of
            ranks.
        ValueError: The rank is not in the job.
    """
    with distributed_model_parallel_state(
        seed,
        rank=rank,
        world_size=world_size,
        accelerator=accelerator,
        backend="fake",
        **sizes,
    ):
        yield
