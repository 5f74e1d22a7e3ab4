"""Batches on a rehearsed GPU have the values of batches on a CPU."""

import pytest

from tests.scripts import output_of, rehearsed

DRAWS = """
import numpy as np, torch
from megakit.data import EpochIndex, bernoulli, bernoulli_like, normal, normal_like

rng, count = np.random.default_rng(0), 0
for probability in (0.8, 0.5, 0.0, 1.0, 0.123):
    for shape in ((1, 28, 28), (5,), (3, 3), (1,)):
        index = EpochIndex(rng.integers(0, 2**40, 2600), rng.integers(0, 2**62, 2600))
        batch = torch.empty(2600, *shape, device="cuda")
        found = bernoulli_like(batch, probability, 42, index)
        assert (found.device, found.dtype) == (batch.device, torch.bool)
        expected = bernoulli(probability, 42, *index, shape)
        assert np.array_equal(found.cpu().numpy(), expected), (probability, shape)
        assert torch.equal(found.cpu(), bernoulli_like(batch.cpu(), probability, 42, index))
        count += expected.size
        found = normal_like(batch, 42, index)
        assert (found.device, found.dtype) == (batch.device, torch.float32)
        expected = normal(42, *index, shape)
        assert np.array_equal(found.cpu().numpy(), expected), shape
print(count)
"""
ROWS = """
import numpy as np, torch
from megakit.data import device, on_device, take

gpu = torch.device("cuda", 0)
images, rows = np.arange(6000, dtype=np.uint8).reshape(1000, 3, 2), np.array([5, 0, 999, 5])
images.flags.writeable = False
for _ in range(2):
    with device.batches_on(gpu):
        found = take(images, on_device(rows))
    assert found.device == gpu and np.array_equal(found.cpu().numpy(), images[rows])
assert take(images, on_device(rows)).device.type == "cpu"
print(len(device._kept))
del images
print(len(device._kept))
"""


@pytest.mark.long
def test_a_gpu_draws_what_a_cpu_draws() -> None:
    assert int(output_of(DRAWS, **rehearsed())) > 10**7


@pytest.mark.long
def test_a_gpu_keeps_an_array_as_long_as_it_exists() -> None:
    assert output_of(ROWS, **rehearsed()).split() == ["1", "0"]
