"""Computes what each rank of a job stores, without the job's other ranks.

The real code builds each rank's share of the model on fake ranks. The tensors have shapes and
dtypes but no memory, so the model may be larger than this machine's memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch.utils._pytree import tree_leaves

from megakit.job.layout import Layout

from .dispatch import DispatchMode
from .fake_ranks import fake_ranks

#: Bytes per weight of Adam's two moments, of a float32 gradient, and of the float32 original of a
#: weight that is trained in bfloat16.
MOMENTS, GRADIENT, ORIGINAL = 8, 4, 4


@dataclass(frozen=True)
class Share:
    """What a rank stores.

    Attributes:
        ranks: The ranks with this share, in the order of their data-parallel coordinate.
        tensor_rank: Tensor-parallel coordinate.
        pipeline_rank: Pipeline coordinate, the stage.
        shapes: Shape of each parameter, by name.
        num_parameters: Number of parameters, trained or not.
        weight_bytes: Bytes of the parameters.
        gradient_bytes: Bytes of the gradients, float32.
        optimizer_bytes: Bytes of Adam's moments, and of the float32 originals of bfloat16 weights.
    """

    ranks: range
    tensor_rank: int
    pipeline_rank: int
    shapes: dict[str, tuple[int, ...]]
    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def figures(self) -> tuple[int, ...]:
        """Returns the numbers that are compared to find equal shares."""
        return (
            self.num_parameters,
            self.weight_bytes,
            self.gradient_bytes,
            self.optimizer_bytes,
        )


def compute_shares(build: Callable[[], tuple[Any, ...]], layout: Layout) -> list[Share]:
    """Computes the share of each tensor- and pipeline-parallel coordinate.

    Data-parallel ranks have equal shares, so each coordinate is built once.

    Args:
        build: Returns a new Lightning module, whose model is not built yet, a data module, and a
            new trainer with NeMo's strategy and precision plugin.
        layout: The parallel sizes, which are also those of the strategy.

    Returns:
        The shares, in the order of the stages, and in each stage of the tensor-parallel ranks.
    """
    model_parallel = layout.tensor * layout.pipeline  # the smallest job with all coordinates
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
    }
    shares = []
    for rank in range(model_parallel):
        module, _, trainer = build()
        with fake_ranks(rank, model_parallel, **sizes), WithoutMemory():
            shares.append(share_of(module, trainer.strategy, layout))
    return shares


class WithoutMemory(DispatchMode):
    """Creates tensors on torch's device `meta`: they have a shape and a dtype, but no memory."""

    def operate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Replaces the device of an operation, unless the operation reads a tensor with values."""
        options = dict(kwargs)
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.lift_fresh.default:  # of `torch.tensor`
            return tensors[0].to("meta")
        if "device" in options and all(tensor.is_meta for tensor in tensors):
            options["device"] = torch.device("meta")
        return func(*args, **options)


def share_of(module: Any, strategy: Any, layout: Layout) -> Share:
    """Builds this rank's part of the model, as NeMo's strategy does, and returns its share."""
    strategy.connect(module)  # writes layout and precision into the model's config
    module.configure_model()
    model = module.module
    strategy.precision_plugin.convert_module(module)
    # Tensor-parallel ranks are neighbours; then data-parallel ranks, or else stages.
    stages_first = bool(strategy.use_tp_pp_dp_mapping)
    weights = dict(model.named_parameters())
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    # Ranks of one data-parallel group are `step` apart.
    step = layout.tensor * (layout.pipeline if stages_first else 1)
    first = tensor_rank + stage * layout.tensor * (1 if stages_first else layout.data)
    trained = [weight for weight in weights.values() if weight.requires_grad]
    number = sum(weight.numel() for weight in trained)
    originals = sum(w.numel() for w in trained if w.dtype != torch.float32)
    optimizer_bytes = MOMENTS * number + ORIGINAL * originals
    if strategy.ddp_config.use_distributed_optimizer:
        optimizer_bytes = -(-optimizer_bytes // layout.data)
    return Share(
        ranks=range(first, first + step * layout.data, step),
        tensor_rank=tensor_rank,
        pipeline_rank=stage,
        shapes={name: tuple(weight.shape) for name, weight in weights.items()},
        num_parameters=sum(weight.numel() for weight in weights.values()),
        weight_bytes=sum(weight.nbytes for weight in weights.values()),
        gradient_bytes=GRADIENT * number,
        optimizer_bytes=optimizer_bytes,
    )
