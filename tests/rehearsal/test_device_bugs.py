"""Bugs that show on a GPU only: each has to be caught, with a message that names the cause."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.scripts import output_of, read_json, rehearsed

pytestmark = pytest.mark.long

#: By name: the code, on two GPUs, and what its error has to say.
BUGS = {
    "a loss mask on the CPU": (
        "torch.rand(4, 3, device='cuda') * torch.ones(4, 3)",
        r"RuntimeError: aten.mul.Tensor: Expected all tensors to be on the same device, "
        r"but found cuda:0 \(4, 3\), cpu \(4, 3\)",
    ),
    "a running total on the CPU": (
        "torch.zeros(()).add_(torch.ones((), device='cuda'))",
        r"aten.add_.Tensor: Expected all tensors to be on the same device",
    ),
    "numpy without cpu": (
        "torch.ones(2, device='cuda').numpy()",
        r"TypeError: can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu\(\)",
    ),
    "a generator of the CPU": (
        "torch.rand(3, device='cuda', generator=torch.Generator().manual_seed(1))",
        r"Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "a tensor of the CPU over NCCL": (
        """
        import torch.distributed as dist
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device="cuda"))
        dist.all_reduce(torch.ones(1))
        """,
        r"allreduce_: No backend type associated with device type cpu",
    ),
    "CUDA in a data loader's worker": (
        """
        class Items(list):
            def __getitem__(self, k): return torch.zeros(1, device="cuda")

        torch.zeros(1, device="cuda")
        list(torch.utils.data.DataLoader(Items([0]), num_workers=1, multiprocessing_context="fork"))
        """,
        r"Cannot re-initialize CUDA in forked subprocess",
    ),
    "a GPU that does not exist": (
        "torch.zeros(1).to('cuda:2')",
        r"CUDA error: invalid device ordinal: cuda:2, of 2 GPUs",
    ),
    "indices on another GPU": (
        "torch.rand(4, device='cuda:0')[torch.tensor([0], device='cuda:1')]",
        r"indices should be either on cpu or on the same device as the tensor, "
        r"but found cuda:0 \(4,\), cuda:1 \(1,\)",
    ),
    "a buffer that is not registered": (
        "torch.cat([torch.ones(3, device='cuda'), torch.arange(3)])",
        r"aten.cat.default: .*but found cuda:0 \(3,\), cpu \(3,\)",
    ),
    "a seed that stays": (
        """
        before = torch.cuda.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
        assert torch.equal(torch.cuda.get_rng_state(), before), "the GPU's generator has changed"
        """,
        r"AssertionError: the GPU's generator has changed",
    ),
    "a learning rate that a graph has fixed": (
        """
        weight, rate, graph = torch.zeros(1, device="cuda"), 1.0, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            weight.add_(1.0, alpha=rate)
        rate = 2.0
        graph.replay()
        assert weight.item() == rate, f"the weight is {weight.item()}"
        """,
        r"AssertionError: the weight is 1.0",
    ),
    "a batch that is not copied to the graph's": (
        """
        batch, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = batch.sum()
        batch = torch.full((2,), 3.0, device="cuda")
        graph.replay()
        assert total.item() == 6.0, f"the sum is {total.item()}"
        """,
        r"AssertionError: the sum is 2.0",
    ),
    "a weight whose memory a graph does not know": (
        """
        weight = torch.nn.Parameter(torch.zeros(2, device="cuda"))
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            weight.add_(1.0)
        weight.data = torch.zeros(2, device="cuda")
        graph.replay()
        assert weight[0].item() == 1.0, "the weight has not changed"
        """,
        r"AssertionError: the weight has not changed",
    ),
    "a graph's result before its first replay": (
        """
        one, graph = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            two = one + one
        assert two.item() == 2.0, f"the sum is {two.item()}"
        """,
        r"AssertionError: the sum is nan",
    ),
    "a capture on the default stream": (
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream):
            torch.zeros(1, device="cuda")
        """,
        r"RuntimeError: CUDA graphs must be captured on a non-default stream",
    ),
    "a value that is read in a capture": (
        """
        one = torch.ones(1, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            one.item()
        """,
        r"AcceleratorError: CUDA error: operation failed due to a previous error during capture",
    ),
    "a thread that waits while a graph forbids it to all": (
        """
        import threading

        one, graph = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            thread = threading.Thread(target=one.tolist)
            thread.start()
            thread.join()
        """,
        r"AcceleratorError: CUDA error: operation failed due to a previous error during capture",
    ),
    "page-locked memory that a graph would read later": (
        """
        batch, host = torch.ones(2, device="cuda"), torch.ones(2).pin_memory()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            batch.copy_(host, non_blocking=True)
        """,
        r"RuntimeError: aten.copy_.default: each replay .* would read the page-locked memory anew",
    ),
    "a seed that is set in a capture": (
        """
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.cuda.manual_seed(1)
        """,
        r"RuntimeError: Cannot call manual_seed of a generator during CUDA graph capture",
    ),
    "a generator that a graph does not advance": (
        """
        generator = torch.Generator("cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.rand(1, device="cuda", generator=generator)
        """,
        r"RuntimeError: a graph draws from a generator that is not registered with it",
    ),
}


#: Code that is right on GPUs, and runs on rehearsed ones.
RIGHT = {
    "saved and loaded": """
        import io

        file = io.BytesIO()
        torch.save({"a": torch.ones(3, device="cuda:1"), "b": torch.ones(3)}, file)
        for place, expected in {None: "cuda:1", "cpu": "cpu", "cuda:0": "cuda:0"}.items():
            file.seek(0)
            found = torch.load(file, map_location=place, weights_only=True)
            assert str(found["a"].device) == expected, place
            assert str(found["b"].device) == (place or "cpu"), place
    """,
    "random numbers of their own": """
        torch.manual_seed(3)
        first, second = (torch.rand(3, device=f"cuda:{k}") for k in range(2))
        assert torch.equal(first.cpu(), second.cpu())
        host = torch.get_rng_state()
        torch.rand(3, device="cuda")
        assert torch.equal(torch.get_rng_state(), host)
        torch.cuda.manual_seed_all(3)
        assert torch.equal(torch.rand(3, device="cuda").cpu(), first.cpu())
    """,
    "training steps of a graph are those of Python": """
        from torch import nn

        batches = [torch.randn(8, 6, device="cuda") for _ in range(8)]

        def train(num_eager):
            torch.manual_seed(1)
            layers = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1)
            model, batch = nn.Sequential(*layers).cuda(), torch.empty(8, 6, device="cuda")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

            def state():
                memory = *model.parameters(), *model.buffers(), torch.cuda.get_rng_state()
                return [tensor.detach().cpu().clone() for tensor in memory]

            def step():
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            losses, stream = [], torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for new in batches[:num_eager]:
                    batch.copy_(new)
                    losses.append(step().item())
            torch.cuda.current_stream().wait_stream(stream)
            graph, before = torch.cuda.CUDAGraph(), state()
            with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
                assert torch.cuda.is_current_stream_capturing()
                loss = step()
            assert all(map(torch.equal, state(), before)), "the capture has changed something"
            for new in batches[num_eager:]:
                batch.copy_(new)
                graph.replay()
                losses.append(loss.item())
            return torch.tensor(losses), *state()

        assert all(map(torch.equal, train(8), train(3)))
    """,
    "a thread goes on while another captures": """
        import threading

        count, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()

        def add():
            count.add_(1.0)
            assert count.item() == 1.0

        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            thread = threading.Thread(target=add)
            thread.start()
            thread.join()
        graph.replay()
        assert count.item() == 1.0
    """,
}

#: Two ranks add their gradients, first by Python, then in a graph.
_RANKS = """
import os, sys, torch
import torch.distributed as dist

rank = 0 if os.fork() else 1
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
weight, batch = (torch.full((3,), 1.0 + rank, device="cuda") for _ in range(2))

def step():
    gradient = weight * batch
    dist.all_reduce(gradient)
    weight.sub_(gradient, alpha=0.1)

graph, before = torch.cuda.CUDAGraph(), weight.clone()
if rank == 0:  # a capture does not communicate: rank 1 need not take part
    with torch.cuda.graph(graph):
        step()
    assert torch.equal(weight, before)
for _ in range(3):
    step() if rank else graph.replay()
expected = 1.0, 2.0
for _ in range(3):
    total = expected[0] + 2 * expected[1]
    expected = [one - 0.1 * total for one in expected]
torch.testing.assert_close(weight.cpu(), torch.full((3,), expected[rank]))
dist.destroy_process_group()
if rank == 0:
    assert os.wait()[1] == 0
else:
    os._exit(0)
"""

_COUNTED = """
import os, torch
host = torch.ones(4, 3)
a, b = host.cuda(), host.pin_memory().to("cuda", non_blocking=True)  # two copies, one wait
c = (a * b).view(3, 4)  # a kernel and a view
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # a wait, and no kernel yet
    c.add_(1.0).mul_(2.0)
for _ in range(3):
    graph.replay()
c.sum().item()  # a kernel and a wait
os._exit(0)
"""

_RUN = """
import json, sys, warnings
import torch

def outcome(name, code):
    try:
        exec(compile(code, name, "exec"), {"torch": torch})
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

warnings.simplefilter("ignore")
print(json.dumps({name: outcome(name, code) for name, code in json.loads(sys.argv[1]).items()}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Each snippet's error by its name, `TYPE: MESSAGE`, or `no error`."""
    snippets = {name: code for name, (code, _) in BUGS.items()} | RIGHT
    given = json.dumps({name: textwrap.dedent(code) for name, code in snippets.items()})
    outcomes: dict[str, str] = json.loads(output_of(_RUN, given, **rehearsed(2)))
    return outcomes


@pytest.mark.parametrize("name", [*BUGS, *RIGHT])
def test_what_is_wrong_is_caught_and_what_is_right_runs(found: dict[str, str], name: str) -> None:
    expected = BUGS[name][1] if name in BUGS else "^no error$"
    assert re.search(expected, found[name], re.DOTALL), found[name]


def test_ranks_communicate_in_a_graph_as_by_python(tmp_path: Path) -> None:
    output_of(_RANKS, tmp_path / "store", **rehearsed(2))


def test_a_report_counts_what_costs_time(tmp_path: Path) -> None:
    output_of(_COUNTED, **rehearsed(1, tmp_path))
    (report,) = map(read_json, tmp_path.iterdir())
    expected = {"synchronizations": 3, "kernels": 2, "launches": 3, "copies": 2, "copied_bytes": 96}
    assert report == {"rank": 0, "opened": [0], **expected}
