"""What a training step leaves out: the run is the same without it, to the last bit where it can be.

The functions below run in the pool's processes, where all cuts are in place; `uncut` takes some of
them back for one training.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest

from megakit.testing import distributed_model_parallel_state
from tests.parallel import jobs

STEPS = 15
#: Where a cut rounds elsewhere: relative of a loss, and absolute of a weight that moves by 8e-3. In
#: bfloat16 a product with its bias is rounded once and not twice, and what is rounded has 8 bits.
TOLERANCES = {"32": (1e-6, 1e-6), "bf16-mixed": (1e-3, 4e-3)}


@dataclass(frozen=True)
class Steps:
    """What came of a training.

    Attributes:
        trained: Losses and weights.
        metrics: All of metrics.csv.
        fused: Of each of Adam's groups of weights, whether one kernel updates it.
        all_reduces: How often a sum over one rank came to torch's own function.
        gradients: How often Megatron's product computed gradients, that of its input included.
        heard: Steps of which NeMo's MegatronParallel told a callback, if one listened.
    """

    trained: jobs.Trained
    metrics: str
    fused: list[bool | None]
    all_reduces: int
    gradients: int
    heard: list[int]


@contextlib.contextmanager
def uncut(cuts: tuple[str, ...]) -> Iterator[None]:
    """Puts back what Megatron, NeMo and torch do by themselves."""
    from megatron.core import utils
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.tensor_parallel import layers, mappings
    from nemo.lightning.pytorch.optim import MegatronOptimizerModule
    from torch import distributed
    from torch.distributed import distributed_c10d

    from megakit.models.layers import _ColumnParallel, _RowParallel
    from megakit.training import trainer
    from megakit.training.optimizer import LeanOptimizerModule
    from megakit.training.strategy import ExactStrategy

    copy, reduce = (
        "copy_to_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region",
    )
    manager, check = "_coalescing_manager", "DistributedDataParallelConfig"
    theirs: dict[str, list[tuple[Any, str, Any]]] = {
        "collectives": [
            (distributed, "all_reduce", distributed_c10d.all_reduce),
            (param_and_grad_buffer, manager, getattr(distributed_c10d, manager)),
            (layers, copy, getattr(mappings, copy)),
            (layers, reduce, getattr(mappings, reduce)),
        ],
        "product": [
            (_ColumnParallel, "_forward_impl", layers.ColumnParallelLinear._forward_impl),
            (_RowParallel, "_forward_impl", layers.RowParallelLinear._forward_impl),
        ],
        "loops": [
            (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
            (clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale),
            (optimizer, "_multi_tensor_copy_this_to_that", _copied_one_by_one),
        ],
        "fused": [(LeanOptimizerModule, "optimizers", MegatronOptimizerModule.optimizers)],
        "schedule": [(ExactStrategy, "_calls_schedule", False)],
        "check": [(trainer, check, partial(_checking, getattr(trainer, check)))],
    }
    with contextlib.ExitStack() as stack:
        for cut in cuts:
            for replacement in theirs[cut]:
                stack.enter_context(mock.patch.object(*replacement))
        yield


def _copied_one_by_one(this: list[Any], that: list[Any], overflow_buf: Any = None) -> None:
    for source, target in zip(this, that, strict=True):
        target.copy_(source)


def _checking(config: Any, **settings: Any) -> Any:
    return config(**(settings | {"check_for_nan_in_grad": True}))


def train(folder: Path, precision: Any, distributed: bool, cuts: tuple[str, ...]) -> Steps:
    import torch
    from megatron.core.tensor_parallel import layers

    from megakit.training.optimizer import LeanOptimizerModule

    fused: list[bool | None] = []
    heard: list[int] = []
    step = torch.optim.AdamW.step

    def watched(self: Any, closure: Any = None) -> Any:
        fused[:] = [group["fused"] for group in self.param_groups]
        return step(self, closure)

    product = layers.LinearWithGradAccumulationAndAsyncCommunication
    options = torch.distributed.distributed_c10d  # where torch's function makes them, once a call
    with (
        contextlib.ExitStack() as stack,
        mock.patch.object(torch.optim.AdamW, "step", watched),
        mock.patch.object(options, "AllreduceOptions", wraps=options.AllreduceOptions) as reached,
        mock.patch.object(product, "backward", wraps=product.backward) as gradients,
    ):
        stack.enter_context(uncut(tuple(cut for cut in cuts if cut != "listener")))
        if "listener" in cuts:

            def listen(self: Any, step: Any) -> None:
                heard.append(step.step_i)

            listener = mock.patch.object(LeanOptimizerModule, "on_megatron_step_end", listen)
            stack.enter_context(listener)
        trained = jobs.pretrain(
            *(jobs.layout(), folder, STEPS, distributed), look_at_samples=False, precision=precision
        )
    metrics = (folder / "pretrain" / "metrics.csv").read_text()
    return Steps(trained, metrics, fused, reached.call_count, gradients.call_count, heard)


@pytest.fixture(scope="session")
def training(ranks, tmp_path_factory):
    """Trains without some of the cuts, once for all tests that ask for the same."""

    @cache
    def run(precision="32", *cuts, distributed=False):
        folder = tmp_path_factory.mktemp("lean")
        cloudpickle.register_pickle_by_value(jobs)  # ranks cannot import it, nor this module
        (steps,) = ranks.run(train, folder, precision, distributed, cuts, world_size=1)
        return steps

    return run


precisions = pytest.mark.parametrize("precision", ["32", "bf16-mixed"])


def assert_identical(one: Steps, other: Steps) -> None:
    assert len(one.trained.losses) == STEPS
    assert one.trained.losses[-1] < one.trained.losses[0]
    assert one.trained.losses == other.trained.losses
    assert one.metrics == other.metrics
    assert one.trained.last.keys() == other.trained.last.keys()
    for name, weight in one.trained.last.items():
        np.testing.assert_array_equal(weight, other.trained.last[name], err_msg=name)
        assert not np.array_equal(weight, one.trained.first[name])


def assert_close(one: Steps, other: Steps, precision: str) -> None:
    of_losses, of_weights = TOLERANCES[precision]
    np.testing.assert_allclose(one.trained.losses, other.trained.losses, rtol=of_losses)
    for name, weight in one.trained.last.items():
        theirs = other.trained.last[name]
        np.testing.assert_allclose(weight, theirs, rtol=0, atol=of_weights, err_msg=name)


class TestOneProcess:
    @precisions
    def test_collectives_of_one_rank(self, training, precision):
        lean, full = training(precision), training(precision, "collectives")
        assert_identical(lean, full)
        # Of the norm and of the loss; those of buckets are collected into one.
        assert full.all_reduces >= 2 * STEPS
        assert lean.all_reduces == 0

    def test_collectives_of_the_distributed_optimizer(self, training):
        lean = training(distributed=True)
        assert lean.trained.optimizer == "DistributedOptimizer"
        assert_identical(lean, training("32", "collectives", distributed=True))

    @precisions
    def test_the_schedule_is_called_and_buckets_are_not_checked(self, training, precision):
        """The norm of the gradient tells what Megatron's check of each bucket would."""
        assert_identical(training(precision), training(precision, "schedule", "check"))

    def test_a_callback_that_listens_is_told_of_each_step(self, training):
        """NeMo's MegatronParallel is then asked to take the steps."""
        deaf, listening = training(), training("32", "listener")
        assert deaf.heard == []
        assert set(range(STEPS)) <= set(listening.heard)
        assert_identical(deaf, listening)

    @precisions
    @pytest.mark.parametrize("distributed", [False, True])
    def test_loops_over_weights(self, training, precision, distributed):
        """The norm, its clipping and the copies of weights take one call each."""
        lean = training(precision, distributed=distributed)
        assert_identical(lean, training(precision, "loops", distributed=distributed))

    @precisions
    def test_torchs_product(self, training, precision):
        lean, full = training(precision), training(precision, "product")
        assert full.gradients > 0
        assert lean.gradients == 0
        assert_close(lean, full, precision)

    @precisions
    @pytest.mark.parametrize("distributed", [False, True])
    def test_fused_adam(self, training, precision, distributed):
        lean = training(precision, distributed=distributed)
        full = training(precision, "fused", distributed=distributed)
        assert set(lean.fused) == {True}
        assert set(full.fused) == {None}
        assert_close(lean, full, precision)


def collectives() -> dict[str, Any]:
    """What comes of collectives in a job of two, in a group of both and in one of this rank."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import layers
    from torch import distributed

    def value() -> torch.Tensor:
        return torch.tensor([1.0 + distributed.get_rank()], requires_grad=True)

    with distributed_model_parallel_state(tensor_model_parallel_size=2):
        told: dict[str, Any] = {}
        both = parallel_state.get_tensor_model_parallel_group()
        alone = parallel_state.get_data_parallel_group()
        for name, group in {"both": both, "alone": alone, "default": None}.items():
            total, later, collected = (value().detach() for _ in range(3))
            distributed.all_reduce(total, group=group)
            work = distributed.all_reduce(later, group=group, async_op=True)
            work.wait()
            with param_and_grad_buffer._coalescing_manager(group, async_ops=False):
                distributed.all_reduce(collected, group=group)
            # A group that is not given is here that of tensor parallelism.
            copied, reduced = value(), value()
            layers.copy_to_tensor_model_parallel_region(copied, group=group).backward(value())
            after = layers.reduce_from_tensor_model_parallel_region(reduced, group=group)
            results: tuple[Any, ...] = (total, later, collected, copied.grad, after)
            told[name] = [float(result.detach()) for result in results]
        return told


def column(image: bool, frozen: bool) -> dict[str, Any]:
    """A column-parallel layer's pass over two ranks, and which product was taken."""
    import torch
    from megatron.core.tensor_parallel import layers

    from megakit.models import column_parallel_linear
    from model_components import PretrainConfig

    names = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")
    with (
        distributed_model_parallel_state(tensor_model_parallel_size=2),
        mock.patch.object(layers, names[0], wraps=getattr(layers, names[0])) as trained,
        mock.patch.object(layers, names[1], wraps=getattr(layers, names[1])) as fixed,
    ):
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
        arrays = {k: v.detach().numpy() for k, v in tensors.items() if v is not None}
        return {"megatrons": (trained.call_count, fixed.call_count), **arrays}


def pipeline(folder: Path, varies: bool) -> tuple[jobs.Trained, str, int]:
    """A training by two stages, its metrics.csv, and how many shapes this rank sent or received."""
    import torch

    from megakit.training import stage_shapes

    mark = "of no config" if varies else stage_shapes.CONSTANT
    with (
        mock.patch.object(stage_shapes, "CONSTANT", mark),
        mock.patch.object(torch.distributed, "P2POp", wraps=torch.distributed.P2POp) as exchanges,
    ):
        layout = jobs.layout(2, pipeline=2)
        trained = jobs.pretrain(layout, folder, STEPS, look_at_samples=False)
    metrics = (folder / "pretrain" / "metrics.csv").read_text()
    of_shapes = [call for call in exchanges.call_args_list if call.args[1].dtype == torch.int64]
    return trained, metrics, len(of_shapes)


def changing_shapes() -> str:
    """Two stages, of which the first sends a tensor of another shape than before."""
    import torch
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megakit.training.stage_shapes import exchange_shapes_once

    with distributed_model_parallel_state(pipeline_model_parallel_size=2):
        config = ModelParallelConfig(
            pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, variable_seq_lengths=True
        )
        config._has_constant_stage_shapes = True
        exchange_shapes_once(config)
        stages = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
        is_first = parallel_state.is_pipeline_first_stage()
        for rows in (4, 4):
            if is_first:
                stages.send_forward([torch.ones(1, rows, 3)], is_last_stage=False)
            else:
                assert stages.recv_forward([(1, 1, 1)], is_first_stage=False)[0].shape == (
                    1,
                    rows,
                    3,
                )
        if not is_first:
            return ""
        with pytest.raises(ValueError, match="variable_seq_lengths=True") as refused:
            stages.send_forward([torch.ones(1, 5, 3)], is_last_stage=False)
        return str(refused.value)


class TestTwoProcesses:
    def test_stages_tell_each_other_shapes_once(self, ranks, tmp_path):
        cloudpickle.register_pickle_by_value(jobs)
        runs = {
            varies: ranks.run(pipeline, tmp_path / str(varies), varies, world_size=2)
            for varies in (False, True)
        }
        for (lean, metrics, shapes), (full, all_metrics, all_shapes) in zip(
            runs[False], runs[True], strict=True
        ):
            assert lean.losses == full.losses
            assert metrics == all_metrics
            assert shapes < 10 < 2 * STEPS <= all_shapes

    def test_a_shape_that_changes_is_refused(self, ranks):
        message, _ = ranks.run(changing_shapes, world_size=2)
        assert "sends tensors of shapes [(1, 5, 3), None], and sent [(1, 4, 3), None]" in message

    def test_collectives_of_several_ranks_are_untouched(self, ranks):
        for rank, told in enumerate(ranks.run(collectives, world_size=2)):
            own = 1.0 + rank
            assert told["alone"] == [own] * 5
            assert told["both"] == told["default"] == [3.0] * 5

    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("image", [False, True])
    def test_a_column_parallel_layer(self, ranks, image, frozen):
        """Its input's gradient is summed up by Megatron's product; images do without."""
        parts = ranks.run(column, image, frozen, world_size=2)
        weight, bias, output = (
            np.concatenate([part[name] for part in parts], axis=-1 if name == "output" else 0)
            for name in ("weight", "bias", "output")
        )
        x = np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6)
        np.testing.assert_allclose(output, x @ weight.T + bias, atol=1e-6)
        for rank, part in enumerate(parts):
            assert part["megatrons"] == (not image and not frozen, not image and frozen)
            if image:
                assert "x.grad" not in part
            else:
                np.testing.assert_allclose(part["x.grad"], 2 * output @ weight, atol=1e-5)
            if frozen:
                assert "weight.grad" not in part
            else:
                own = output[:, 4 * rank : 4 * rank + 4]
                np.testing.assert_allclose(part["weight.grad"], 2 * own.T @ x, atol=1e-5)
