"""The pool of ranks and Megatron's parallel state: set up, taken down, and what failures look like.

The functions below run in the pool's processes.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from megakit.testing import RankError, Ranks, distributed_model_parallel_state


def place(tensor, pipeline):
    """Where this rank stands, and the sum of all ranks."""
    import torch
    from megatron.core import parallel_state

    with distributed_model_parallel_state(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
    ):
        total = torch.tensor(torch.distributed.get_rank())
        torch.distributed.all_reduce(total)
        return (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            int(total),
        )


ALLGATHER = 4  # torch's OpType; 6 is the coalesced one


def gather_two_tensors():
    """What they are gathered to, and the kinds of collectives."""
    import torch
    from torch.distributed import distributed_c10d

    with distributed_model_parallel_state():
        inputs = [torch.full((size,), float(os.environ["RANK"])) for size in (1, 2)]
        outputs = [torch.empty(2 * len(one)) for one in inputs]
        with distributed_c10d._coalescing_manager(async_ops=True) as gathers:
            for output, one in zip(outputs, inputs, strict=True):
                torch.distributed.all_gather_into_tensor(output, one, async_op=True)
        gathers.wait()
        (works,) = gathers.works
        return [one.tolist() for one in outputs], [work._get_op_type() for work in works]


def fail_on_rank_one():
    import torch

    with distributed_model_parallel_state():
        if torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("only here")
        torch.distributed.barrier()


def die_on_rank_one(number):
    import torch

    with distributed_model_parallel_state():
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), number)
        torch.distributed.barrier()


def sleep_deep(frames):
    """In so many frames that the end of a log would not show this one."""
    return sleep_deep(frames - 1) if frames else time.sleep(60)


def wait_on_rank_zero():
    if os.environ["RANK"] == "0":
        sleep_deep(50)


def draw(seed):
    import torch

    torch.manual_seed(1)
    with distributed_model_parallel_state(seed):
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            inside = torch.rand(1).item()
    return inside, torch.rand(1).item()


def runs(process):
    """Whether a process is there and more than a zombie that nobody asked for."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX"


class TestState:
    def test_the_places_of_ranks(self, ranks):
        """The sum shows that they talk to one another."""
        places = [(0, 0, 0, 6), (1, 0, 0, 6), (0, 1, 0, 6), (1, 1, 0, 6)]
        assert ranks.run(place, 2, 2, world_size=4) == places

    def test_the_seed_decides_and_torchs_own_state_comes_back(self, ranks):
        ((first, after),) = ranks.run(draw, 1, world_size=1)
        ((other, after_other),) = ranks.run(draw, 2, world_size=1)
        assert ranks.run(draw, 1, world_size=1) == [(first, after)]
        assert other != first
        assert after_other == after


def test_gathers_are_not_coalesced(ranks):
    """Two workers of gloo would race for the name of a coalesced one, and abort at times."""
    gathered = [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
    assert ranks.run(gather_two_tensors, world_size=2) == [(gathered, [ALLGATHER] * 2)] * 2


class TestFailures:
    def test_the_failing_rank_s_traceback_and_no_other(self, ranks):
        """The pool goes on, with fresh ranks for each job."""
        server, pids = ranks.run(os.getppid), ranks.run(os.getpid)
        with pytest.raises(RankError) as caught:
            ranks.run(fail_on_rank_one, world_size=2)
        message = str(caught.value)
        assert message.startswith("rank 1 of 2 failed: Traceback")
        assert message.rstrip().endswith("ZeroDivisionError: only here")
        assert "in fail_on_rank_one" in message
        assert message.count("Traceback") == 1
        assert ranks.run(os.getppid) == server
        assert not set(ranks.run(os.getpid)) & set(pids)

    def test_a_job_has_as_many_ranks_as_there_are(self, ranks):
        with pytest.raises(ValueError, match="world_size=9: this pool has 8"):
            ranks.run(os.getpid, world_size=9)

    @pytest.mark.long
    def test_death_and_silence(self):
        """And the pool goes on."""
        with Ranks(2, timeout=30) as pool:
            before = pool.run(os.getpid)
            with pytest.raises(RankError, match="rank 1 of 2 failed: it died with status -9"):
                pool.run(die_on_rank_one, signal.SIGKILL)
            with pytest.raises(RankError, match=r"status -6:(.|\n)*in die_on_rank_one"):
                pool.run(die_on_rank_one, signal.SIGABRT)
            pool.timeout = 1
            with pytest.raises(RankError, match=r"rank 0 of 2 .* 1:\nTimeout(.|\n)*in sleep_deep"):
                pool.run(wait_on_rank_zero)
            after = pool.run(os.getpid)
        assert not set(before) & set(after)
        deadline = time.monotonic() + 30
        while [process for process in (*before, *after) if runs(process)]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
