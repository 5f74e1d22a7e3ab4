"""Bugs that show on a GPU only: each has to be caught, with a message that names the cause."""

import json
import re
import textwrap

import pytest

from tests.scripts import output_of, rehearsed

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
}

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
