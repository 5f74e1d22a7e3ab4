"""What makes a training step cheaper changes its numbers by rounding only.

The functions below run in the pool's processes, where all cuts are in place; `uncut` takes some of
them back for one training.
"""

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest

from megakit.testing import distributed_model_parallel_state
from tests.parallel import jobs

STEPS = 15


@contextlib.contextmanager
def uncut(cut: str | None) -> Iterator[None]:
    """Puts back what Megatron and NeMo do by themselves."""
    from megatron.core.optimizer import clip_grads, optimizer
    from nemo.lightning.pytorch.optim import MegatronOptimizerModule

    from megakit.training.optimizer import LeanOptimizerModule

    theirs: dict[str | None, list[tuple[Any, str, Any]]] = {
        None: [],
        "loops": [
            *(
                (optimizer, name, getattr(clip_grads, name))
                for name in ("get_grad_norm_fp32", "clip_grad_by_total_norm_fp32")
            ),
            (optimizer, "_multi_tensor_copy_this_to_that", _copied_one_by_one),
        ],
        "hooks": [(LeanOptimizerModule, "optimizers", MegatronOptimizerModule.optimizers)],
    }
    with contextlib.ExitStack() as stack:
        for replacement in theirs[cut]:
            stack.enter_context(mock.patch.object(*replacement))
        yield


def _copied_one_by_one(this: list[Any], that: list[Any], overflow_buf: Any = None) -> None:
    for source, target in zip(this, that, strict=True):
        target.copy_(source)


def train(folder: Path, precision: Any, cut: str | None) -> jobs.Trained:
    with uncut(cut):
        return jobs.pretrain(
            *(jobs.layout(), folder, STEPS), look_at_samples=False, precision=precision
        )


@pytest.fixture(scope="module")
def training(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains without some of the cuts, once for all tests that ask for the same."""

    @cache
    def run(precision: str, cut: str | None = None) -> jobs.Trained:
        folder = tmp_path_factory.mktemp("lean")
        cloudpickle.register_pickle_by_value(jobs)  # ranks cannot import it, nor this module
        (trained,) = ranks.run(train, folder, precision, cut, world_size=1)
        assert len(trained.losses) == STEPS
        assert trained.losses[-1] < trained.losses[0]
        return trained

    return run


def test_loops_over_weights(training: Any) -> None:
    """The norm, its clipping and the copies of weights take one call each: the same bits."""
    lean, full = training("bf16-mixed"), training("bf16-mixed", "loops")
    assert lean.losses == full.losses
    for name, weight in lean.last.items():
        np.testing.assert_array_equal(weight, full.last[name], err_msg=name)
        assert not np.array_equal(weight, lean.first[name])


def test_hooks_that_add_gradients(training: Any) -> None:
    """Autograd adds the gradients to Megatron's buffers: the same bits."""
    lean, full = training("bf16-mixed"), training("bf16-mixed", "hooks")
    assert lean.losses == full.losses
    for name, weight in lean.last.items():
        np.testing.assert_array_equal(weight, full.last[name], err_msg=name)


def column(image: bool, frozen: bool) -> dict[str, Any]:
    """A column-parallel layer's pass over two ranks."""
    import torch

    from megakit.models import column_parallel_linear
    from model_components import PretrainConfig

    with distributed_model_parallel_state(tensor_model_parallel_size=2):
        layer = column_parallel_linear(PretrainConfig(seed=1), 6, 8, "layer")
        layer.weight.requires_grad_(not frozen)
        x = torch.linspace(-1, 1, 30).reshape(5, 6).requires_grad_(not image)
        output, _ = layer(x)
        output.square().sum().backward()
        tensors = {
            "weight": layer.weight,
            "bias": layer.bias,
            "output": output,
            "weight.grad": layer.weight.grad,
            "x.grad": x.grad,
        }
        return {k: v.detach().numpy() for k, v in tensors.items() if v is not None}


@pytest.mark.parametrize(("image", "frozen"), [(False, False), (True, False), (False, True)])
def test_a_column_parallel_layer(ranks: Any, image: bool, frozen: bool) -> None:
    """Its input's gradient is summed up by Megatron's product; images do without."""
    parts = ranks.run(column, image, frozen, world_size=2)
    weight, bias, output = (
        np.concatenate([part[name] for part in parts], axis=-1 if name == "output" else 0)
        for name in ("weight", "bias", "output")
    )
    x = np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6)
    np.testing.assert_allclose(output, x @ weight.T + bias, atol=1e-6)
    for rank, part in enumerate(parts):
        if image:
            assert "x.grad" not in part
        else:
            np.testing.assert_allclose(part["x.grad"], 2 * output @ weight, atol=1e-5)
        if frozen:
            assert "weight.grad" not in part
        else:
            own = output[:, 4 * rank : 4 * rank + 4]
            np.testing.assert_allclose(part["weight.grad"], 2 * own.T @ x, atol=1e-5)
