"""Random effects: even numbers that belong to (seed, epoch, index), alone and in batches."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest  # type: ignore[import-untyped]

from megakit.data import bernoulli, normal, sample_generator, uniform


def fair(*arguments):
    """`bernoulli` with the arguments of `uniform`."""
    return bernoulli(0.5, *arguments)


@pytest.fixture(params=[uniform, fair, normal], ids=["uniform", "bernoulli", "normal"])
def draw(request):
    return request.param


@pytest.mark.parametrize("shape", [(), (28, 28), (70_001,)])
def test_equal_in_a_batch_and_alone(draw, shape):
    epochs, indices = np.array([0, 0, 3, 10**6]), np.array([0, 1, 1, 10**12])
    batch = draw(42, epochs, indices, shape)
    assert batch.shape == (4, *shape)
    assert batch.dtype == (np.bool_ if draw is fair else np.float32)
    for row in range(4):
        alone = draw(42, int(epochs[row]), int(indices[row]), shape)
        assert torch.from_numpy(alone).shape == shape  # an array, even of a single number
        np.testing.assert_array_equal(alone, batch[row])
    np.testing.assert_array_equal(draw(42, 0, np.array([0, 1]), shape), batch[:2])


def test_known_values():
    """What any platform and version must give."""
    np.testing.assert_array_equal(uniform(42, 1, 2, (3,)) * 2**24, [2498672, 13011025, 2052551])
    np.testing.assert_allclose(sample_generator(42, 1, 2).random(), 0.5840890785571974, rtol=1e-12)
    np.testing.assert_allclose(
        normal(42, 1, 2, (3,)), [0.31155542, -0.11854161, -0.2434662], rtol=1e-7
    )
    kept = bernoulli(0.8, 42, 1, 2, (20,)).astype(int)
    assert "".join(map(str, kept)) == "11111111101101111111"


def test_even_in_every_direction():
    """Along a sample, over samples, over epochs."""
    many = np.arange(100_000)
    for arguments in ((3, 0, 0, (100_000,)), (3, 0, many), (3, many, 0)):
        values = uniform(*arguments)
        assert 0 <= values.min() <= values.max() < 1
        assert 1e-3 < kstest(values, "uniform").pvalue < 1 - 1e-3
        assert 1e-3 < kstest(normal(*arguments), "norm").pvalue < 1 - 1e-3
        assert abs(bernoulli(0.2, *arguments).mean() - 0.2) < 4 * (0.16 / values.size) ** 0.5


def test_normal_is_finite_at_the_ends_of_its_integers(monkeypatch):
    """The logarithm of the integer 0 would be infinite."""
    ends = np.array([[0, 0], [2**32 - 1, 0]], np.uint32)
    monkeypatch.setattr("megakit.data.random_effects._integers", lambda *_: ends)
    assert np.abs(normal(42, 0, 0)).max() == pytest.approx(6.66, abs=0.01)


def test_probabilities_at_the_ends():
    assert not bernoulli(0, 1, 0, 0, (10_000,)).any()
    assert bernoulli(1, 1, 0, 0, (10_000,)).all()
    for probability in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=f"from 0 to 1, got {probability}"):
            bernoulli(probability, 1, 0, 0)
