"""Sets up Megatron's parallel state for tests."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal
from unittest import mock

from megakit.runtime.accelerator import (
    AcceleratorName,
    destroy_parallel_state,
    find_accelerator,
    own_gpu,
    use_accelerator,
    use_full_float32,
)
from megakit.runtime.patching import require_attribute


@contextlib.contextmanager
def distributed_model_parallel_state(
    seed: int = 42,
    rank: int | None = None,
    world_size: int | None = None,
    backend: Literal["gloo", "nccl", "fake"] | None = None,
    *,
    accelerator: AcceleratorName = "auto",
    timeout: float = 60.0,
    **sizes: Any,
) -> Iterator[None]:
    """Sets up torch.distributed and Megatron's parallel state, and destroys both at the end.

    A single process is a job of one rank. A process that `Ranks`, torchrun or `--devices` started
    joins the other ranks of its job. With `rank` and `world_size`, the process joins a job that no
    launcher has started: every rank calls this function, and they meet at MASTER_ADDR and
    MASTER_PORT, by default at port 29500 of this machine. torch's random state and the environment
    are restored at the end.

    On a CPU, the patches of `megakit.runtime` are applied for the rest of the process. So no code
    of the process may import Megatron before the first use of this function. On a GPU, TF32 is
    switched off for the rest of the process, because tests compare layouts in float32.

    Args:
        seed: Seed of Megatron's random-number tracker, from which dropout draws.
        rank: Number of this rank, from 0; by default the environment's RANK, or 0.
        world_size: Number of ranks; by default the environment's WORLD_SIZE, or 1.
        backend: By default NCCL on GPUs and gloo on CPUs. With gloo, several ranks can share a GPU.
            `fake` needs no other ranks: see `fake_ranks`.
        accelerator: `auto` uses a GPU if it works, else the CPU.
        timeout: Seconds that a collective waits for the other ranks.
        **sizes: Arguments of Megatron's `initialize_model_parallel`, such as
            `tensor_model_parallel_size=2`; the remaining ranks are data parallel.

    Raises:
        RuntimeError: torch.distributed is set up already, or the sizes do not fit the number of
            ranks.
        ValueError: The rank is not in the job.
    """
    name = _accelerator(accelerator)
    use_accelerator(name)
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if dist.is_initialized():
        raise RuntimeError("torch.distributed is set up already. A process runs one job at a time.")
    given, environment, excepthook = (rank, world_size), dict(os.environ), sys.excepthook
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank={rank}: a job of {world_size} ranks has the ranks 0 to {world_size - 1}."
        )
    random_state = torch.get_rng_state()
    try:
        if given != (None, None):
            _set_environment(rank, world_size)
        if name == "gpu":
            torch.cuda.set_device(own_gpu())
            use_full_float32()
        dist.init_process_group(
            backend or ("gloo" if name == "cpu" else "nccl"),
            store=_store(backend, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        if backend == "fake":
            sizes = {"create_gloo_process_groups": False, **sizes}
        with _only_groups_of(rank) if backend == "fake" else contextlib.nullcontext():
            parallel_state.initialize_model_parallel(**sizes)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        yield
    except BaseException as error:
        note_time(error)
        raise
    finally:
        destroy_parallel_state()
        torch.set_rng_state(random_state)
        sys.excepthook = excepthook  # torch's adds the rank, once for each job
        os.environ.clear()
        os.environ.update(environment)


def _set_environment(rank: int, world_size: int) -> None:
    """Sets the variables from which the frameworks and `own_gpu` read the job."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    for variable, value in (
        *(("LOCAL_RANK", str(rank)), ("LOCAL_WORLD_SIZE", str(world_size))),
        *(("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")),
    ):
        os.environ.setdefault(variable, value)


@contextlib.contextmanager
def _only_groups_of(rank: int) -> Iterator[None]:
    """Makes Megatron create only the groups of one rank.

    Megatron creates the groups of all ranks, since torch's real backends require this of each rank.
    The others take more than half of the time of a fake job.
    """
    from megatron.core import parallel_state

    original = require_attribute(parallel_state, "create_group")

    def create_group(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        return original(ranks, *args, **kwargs) if rank in ranks else None

    with mock.patch.object(parallel_state, "create_group", create_group):
        yield


def _store(backend: str | None, world_size: int) -> Any:
    """Returns a store for a job that needs no port; None lets the ranks meet at MASTER_ADDR."""
    import torch.distributed as dist

    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        return FakeStore()
    return dist.HashStore() if world_size == 1 else None  # type: ignore[attr-defined]


def note_time(error: BaseException) -> float:
    """Stores and returns the time at which an exception was first seen.

    The exception with the earliest time is the cause; those of other ranks follow from it.
    """
    noted: float = vars(error).setdefault("_failed_at", time.monotonic())
    return noted


def _accelerator(requested: AcceleratorName) -> Literal["cpu", "gpu"]:
    from megakit.runtime import megatron_on_cpu

    # After the patches for the CPU, a process cannot use its GPU any more.
    is_on_cpu = megatron_on_cpu.patch_torch.cache_info().currsize > 0
    return "cpu" if is_on_cpu and requested == "auto" else find_accelerator(requested).name
