"""Bugs that show on a GPU only: each has to be caught, with a message that names the cause."""

import re
import textwrap

import pytest

from tests.megakit.testing.rehearsal.snippets import outcomes

#: By name: the code, on two GPUs, and what its error has to say.
BUGS = {
    "a loss mask on the CPU": (
        """
        losses, mask = torch.rand(4, 3, device="cuda"), torch.ones(4, 3)
        (losses * mask).sum()
        """,
        r"RuntimeError: aten.mul.Tensor: Expected all tensors to be on the same device, "
        r"but found cuda:0 \(4, 3\), cpu \(4, 3\)",
    ),
    "a running total on the CPU": (
        """
        total = torch.zeros(())
        total += torch.ones((), device="cuda")
        """,
        r"aten.add_.Tensor: Expected all tensors to be on the same device",
    ),
    "numpy without cpu": (
        """
        torch.ones(2, device="cuda").numpy()
        """,
        r"TypeError: can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu\(\)",
    ),
    "a numpy function of a GPU's tensor": (
        """
        import numpy
        numpy.mean(numpy.asarray(torch.ones(2, device="cuda:1")))
        """,
        r"TypeError: can't convert cuda:1 device type tensor to numpy",
    ),
    "a generator of the CPU": (
        """
        generator = torch.Generator().manual_seed(1)
        torch.rand(3, device="cuda", generator=generator)
        """,
        r"Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "a tensor of the CPU over NCCL": (
        """
        import torch.distributed as dist
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(1, device="cuda"))
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
        """,
        r"allreduce_: No backend type associated with device type cpu",
    ),
    "CUDA in a data loader's worker": (
        """
        class Items(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, k): return torch.zeros(1, device="cuda")

        torch.zeros(1, device="cuda")
        list(torch.utils.data.DataLoader(Items(), num_workers=1, multiprocessing_context="fork"))
        """,
        r"Cannot re-initialize CUDA in forked subprocess",
    ),
    "CUDA after a fork": (
        """
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        torch.zeros(1, device="cuda")
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            pool.submit(torch.zeros, 1, device="cuda").result()
        """,
        r"Cannot re-initialize CUDA in forked subprocess",
    ),
    "a GPU that does not exist": (
        """
        torch.zeros(1).to("cuda:2")
        """,
        r"CUDA error: invalid device ordinal: cuda:2, of 2 GPUs",
    ),
    "indices on another GPU": (
        """
        torch.rand(4, device="cuda:0")[torch.tensor([0], device="cuda:1")]
        """,
        r"indices should be either on cpu or on the same device as the tensor, "
        r"but found cuda:0 \(4,\), cuda:1 \(1,\)",
    ),
    "a layer made in forward": (
        """
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.trunk, self.head = torch.nn.Linear(3, 2), None

            def forward(self, x):
                self.head = self.head or torch.nn.Linear(2, 1)
                return self.head(self.trunk(x))

        Model().cuda()(torch.ones(4, 3, device="cuda"))
        """,
        r"aten.addmm.default: .*but found cpu \(1,\), cuda:0 \(4, 2\), cpu \(2, 1\)",
    ),
    "a buffer that is not registered": (
        """
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.positions = torch.arange(3)

            def forward(self, x):
                return torch.cat([x, self.positions])

        Model().cuda()(torch.ones(3, device="cuda"))
        """,
        r"aten.cat.default: .*but found cuda:0 \(3,\), cpu \(3,\)",
    ),
    "a thread that computes on another GPU": (
        """
        import threading
        torch.cuda.set_device(1)
        thread = threading.Thread(target=lambda: torch.zeros(1, device="cuda"))
        thread.start()
        thread.join()
        assert len(counts.opened) == 1, counts.opened
        """,
        r"'GPU 0 at a thread that computes on another GPU:4 <lambda>",
    ),
    "the loss is read at every step": (
        """
        weight = torch.ones(3, device="cuda", requires_grad=True)
        for step in range(5):
            loss = weight.sum()
            loss.backward()
            loss.item()
        assert counts.total["synchronizations"] <= 1, counts.where("synchronizations")
        """,
        r"AssertionError: 5 _local_scalar_dense at the loss is read at every step:6 <module>",
    ),
    "a copy from pageable memory": (
        """
        batch = torch.ones(8, 3).to("cuda", non_blocking=True)
        assert counts.total["synchronizations"] == 0, counts.where("synchronizations")
        """,
        r"AssertionError: 1 copy to the GPU at a copy from pageable memory:2 <module>",
    ),
    "a choice by a mask": (
        """
        x = torch.rand(8, device="cuda")
        x[x > 0.5]
        assert counts.total["synchronizations"] == 0, counts.where("synchronizations")
        """,
        r"AssertionError: 1 boolean index at a choice by a mask:3 <module>",
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


@pytest.fixture(scope="module")
def caught() -> dict[str, str]:
    begin = "with rehearse_gpu(2) as counts:"
    return outcomes(
        {
            name: begin + textwrap.indent(textwrap.dedent(code), "    ")
            for name, (code, _) in BUGS.items()
        }
    )


@pytest.mark.parametrize("name", BUGS)
def test_is_caught(caught: dict[str, str], name: str) -> None:
    assert re.search(BUGS[name][1], caught[name], re.DOTALL), caught[name]
