"""Batches that are computed on a GPU: the same as on a CPU, from fewer bytes, without waiting."""

import numpy as np
import pytest
import torch

from megakit.data.device import batches_on, on_device
from tests.scripts import output_of, run_python

#: A process of its own rehearses a GPU, because the suite's processes run Megatron on the CPU.
REHEARSED = """
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset
from megakit.data import BatchedMultiEpochDatasetWrapper, MultiEpochDatasetResampler, bernoulli
from megakit.data.device import batches_on, copied, on_device
from megakit.data.loader import load_on, make_loader
from megakit.testing import rehearse_gpu
from mnist.dataset import MNISTCustom

class DropPixels(BatchedMultiEpochDatasetWrapper):
    def apply_transform_batch(self, batch, index):
        kept = bernoulli(0.7, 42, index.epoch, index.idx, (1, 28, 28))
        return {**batch, "corrupted": batch["data"] * on_device(kept, like=batch["data"])}

GPU = torch.device("cuda", 0)
rng = np.random.default_rng(1)
images, labels = rng.integers(0, 256, (600, 28, 28), np.uint8), rng.integers(0, 10, 600)

class Batches:
    num_samples = end = 600
    def __len__(self): return 12
    def __iter__(self): return iter(np.arange(600).reshape(12, 50))

def resampled(inner):
    return MultiEpochDatasetResampler(DropPixels(inner), num_samples=600)

def batches(dataset, computes_there, **options):
    options = {"num_workers": 0, **options}
    loader = make_loader(DataLoader(dataset, **options), Batches())
    return list(load_on(loader, GPU, computes_there))

def same(found, expected):
    assert len(found) == len(expected) == 12
    for one, other in zip(found, expected):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].device == GPU and torch.equal(one[name].cpu(), other[name]), name
            assert one[name].dtype == other[name].dtype
"""


def rehearsed(code: str) -> str:
    return output_of(REHEARSED + code)


@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.bool_, np.int64])
def test_on_a_cpu_it_is_from_numpy(kind: type) -> None:
    array: np.ndarray = np.arange(24).reshape(2, 3, 4).astype(kind)
    for device in (None, torch.device("cpu")):
        with batches_on(device):
            tensor = on_device(array)
        assert tensor.data_ptr() == array.ctypes.data
        assert torch.equal(tensor, torch.from_numpy(array))


def test_arrays_on_a_gpu() -> None:
    """Booleans come as bits, for any shape; like= follows the batch, and nothing waits."""
    rehearsed("""
with rehearse_gpu() as counts:
    for shape in ((0,), (1,), (7,), (8,), (3, 5, 7), (2, 4, 0)):
        for kind in (bool, np.uint8, np.float32):
            array = rng.integers(0, 2, shape).astype(kind)
            before = counts.total.copy()
            with batches_on(GPU):
                found = on_device(array)
            assert found.device == GPU and found.shape == shape, (found.device, found.shape)
            moved = counts.total["bytes"] - before["bytes"]
            assert moved == (-(-array.size // 8) if kind is bool else array.nbytes), (shape, kind)
            assert counts.total["synchronizations"] == before["synchronizations"]
            assert np.array_equal(found.cpu().numpy(), array)
    on_gpu, on_cpu = torch.zeros(1, device=GPU), torch.zeros(1)
    assert on_device(array, like=on_gpu).device == GPU
    with batches_on(GPU):
        assert on_device(array, like=on_cpu).device.type == "cpu"
    assert on_device(array).device.type == "cpu"
""")


def test_the_tutorials_batches_on_a_gpu() -> None:
    """They equal the CPU's, whether computed there or not; bytes and bits are copied."""
    rehearsed("""
inner = MNISTCustom.from_arrays(images, labels)
expected = list(make_loader(DataLoader(resampled(inner)), Batches()))
moved = {}
with rehearse_gpu() as counts:
    for computes_there in (True, False):
        before = counts.total.copy()
        found = batches(resampled(inner), computes_there)
        moved[computes_there] = counts.total["bytes"] - before["bytes"]
        assert counts.total["synchronizations"] == before["synchronizations"]
        same(found, expected)
assert moved[True] == 600 * (784 + 784 // 8 + 8 + 8), moved
assert moved[False] == 600 * (784 * 4 * 2 + 8 + 8), moved
""")


def test_a_batch_of_its_own_class_is_moved_by_its_own_method() -> None:
    rehearsed("""
class Graph:
    device = torch.device("cpu")
    def to(self, device):
        moved = Graph()
        moved.device = device
        return moved

with rehearse_gpu():
    found = copied({"graph": Graph(), "name": "x", "parts": [torch.zeros(2)]}, GPU)
    assert found["graph"].device == GPU and found["parts"][0].device == GPU
    assert found["name"] == "x" and copied(Graph(), GPU).device == GPU

class InPlace(Graph):
    def to(self, device):
        self.device = device

with rehearse_gpu():
    assert copied({"graph": InPlace()}, GPU)["graph"].device == GPU
""")


@pytest.mark.parametrize("computes_there", [True, False])
def test_a_thread_that_prefetches_uses_the_ranks_own_gpu(computes_there: bool) -> None:
    """Each thread has its own current GPU, at first GPU 0."""
    rehearsed(f"""
import threading, time

class Own(MNISTCustom):
    def get_batch(self, indices):
        threads.add(threading.current_thread().name.partition("-")[0])
        return {{"own": torch.zeros(len(indices), 200_000, device="cuda")}}

threads = set()
with rehearse_gpu(2) as counts:
    torch.cuda.set_device(1)
    loader = make_loader(DataLoader(Own.from_arrays(images, labels)), Batches())
    for batch in load_on(loader, torch.device("cuda", 1), {computes_there}):
        assert str(batch["own"].device) == "cuda:1"
        time.sleep(0.01)  # a user that is busy, so that a thread fetches
    assert {{text[:5] for text in counts.opened}} == {{"GPU 1"}}, counts.opened
assert any(name.startswith("prefetch") for name in threads), threads
""")


def test_workers_compute_on_the_cpu() -> None:
    """A forked process cannot use its parent's GPU; its batches are page-locked and copied."""
    rehearsed("""
inner = MNISTCustom.from_arrays(images, labels)
expected = list(make_loader(DataLoader(resampled(inner)), Batches()))
with rehearse_gpu() as counts:
    torch.zeros(1, device=GPU)
    before = counts.total.copy()
    found = batches(resampled(inner), True, num_workers=2)
    assert counts.total["synchronizations"] == before["synchronizations"]
    same(found, expected)
""")


def test_a_dataset_that_computes_on_the_cpu_below_a_transform_that_follows_it() -> None:
    rehearsed("""
class OnCpu(MNISTCustom):
    def get_batch(self, indices):
        batch = super().get_batch(indices)
        return {name: tensor.cpu() for name, tensor in batch.items()}

inner = MNISTCustom.from_arrays(images, labels)
expected = list(make_loader(DataLoader(resampled(inner)), Batches()))
with rehearse_gpu():
    same(batches(resampled(OnCpu.from_arrays(images, labels)), True), expected)
""")


@pytest.mark.parametrize(
    "transform", ["torch.ones(50, 1, 28, 28)", "torch.from_numpy(batch['data'].numpy())"]
)
def test_a_transform_that_mixes_devices_is_told_the_remedy(transform: str) -> None:
    failed = run_python(
        "-c",
        REHEARSED
        + f"""
class Own(DropPixels):
    def apply_transform_batch(self, batch, index):
        return {{**batch, "corrupted": batch["data"] * {transform}}}

inner = Own(MNISTCustom.from_arrays(images, labels))
with rehearse_gpu():
    batches(MultiEpochDatasetResampler(inner, num_samples=600), True)
""",
    )
    assert failed.status == 1
    assert "The data module has computes_on_device=True, so batches are computed on cuda:0." in (
        failed.err
    )
    assert "megakit.data.on_device" in failed.err
