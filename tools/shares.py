"""Computes what each rank of a job holds and communicates, without the job's other ranks.

The real code builds each rank's share of the model on fake ranks, and runs its forward and backward
pass. The tensors have shapes and dtypes but no memory, so the model may be larger than this
machine's memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from megakit.job.layout import Layout
from tools.communication import CountCommunication
from tools.fake_ranks import fake_ranks

#: torch's class has no types.
_TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
#: Bytes per weight of Adam's two moments, of a float32 gradient, and of the float32 original of a
#: weight that is trained in bfloat16.
MOMENTS, GRADIENT, ORIGINAL = 8, 4, 4


@dataclass(frozen=True)
class Share:
    """What a rank holds, and communicates in a training step.

    Bytes of collectives are those of their whole tensor, see `CountCommunication`. Single numbers,
    such as the loss and the gradient's norm, are left out.

    Attributes:
        ranks: The ranks with this share, in the order of their data-parallel coordinate.
        tensor_rank: Tensor-parallel coordinate.
        pipeline_rank: Pipeline coordinate, the stage.
        shapes: Shape of each parameter, by name.
        num_parameters: Number of parameters, trained or not.
        weight_bytes: Bytes of the parameters.
        gradient_bytes: Bytes of the gradients, float32.
        optimizer_bytes: Bytes of Adam's moments, and of the float32 originals of bfloat16 weights.
        tensor_bytes: Bytes of the collectives with tensor-parallel ranks.
        pipeline_bytes: Bytes sent to the neighbouring stages.
        data_bytes: Bytes of the gradients that are reduced over the data-parallel ranks.
    """

    ranks: range
    tensor_rank: int
    pipeline_rank: int
    shapes: dict[str, tuple[int, ...]]
    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    tensor_bytes: int
    pipeline_bytes: int
    data_bytes: int

    @property
    def figures(self) -> tuple[int, ...]:
        """Returns the numbers that are compared to find equal shares."""
        return (
            self.num_parameters,
            self.weight_bytes,
            self.gradient_bytes,
            self.optimizer_bytes,
            self.tensor_bytes,
            self.pipeline_bytes,
            self.data_bytes,
        )


def compute_shares(build: Callable[[], tuple[Any, ...]], batch: Any, layout: Layout) -> list[Share]:
    """Computes the share of each tensor- and pipeline-parallel coordinate.

    Data-parallel ranks have equal shares, so each coordinate is built once.

    Args:
        build: Returns a new Lightning module, whose model is not built yet, a data module, and a
            new trainer with NeMo's strategy and precision plugin.
        batch: A micro batch of this job, as the module's `training_step` receives it.
        layout: The parallel sizes, which are also those of the strategy, and the batch sizes.

    Returns:
        The shares, in the order of the stages, and in each stage of the tensor-parallel ranks.
    """
    model_parallel = layout.tensor * layout.pipeline  # the smallest job with all coordinates
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
    }
    received: list[Any] = [None] * layout.tensor
    shares = []
    for pipeline_rank in range(layout.pipeline):
        for tensor_rank in range(layout.tensor):
            rank = tensor_rank + layout.tensor * pipeline_rank
            module, _, trainer = build()
            precision = trainer.precision
            inputs = tree_map_only(
                torch.Tensor, partial(_without_memory, precision=precision), batch
            )
            with fake_ranks(rank, model_parallel, **sizes), WithoutMemory():
                stage = _Stage(module, trainer.strategy, layout)
                reduced, sent, received[tensor_rank] = stage.run(inputs, received[tensor_rank])
                shares.append(stage.share(reduced, sent))
    return shares


class WithoutMemory(_TorchDispatchMode):
    """Creates tensors on torch's device `meta`: they have a shape and a dtype, but no memory."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replaces the device of an operation, unless the operation reads a tensor with values."""
        options = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.lift_fresh.default:  # of `torch.tensor`
            return tensors[0].to("meta")
        if "device" in options and all(tensor.is_meta for tensor in tensors):
            options["device"] = torch.device("meta")
        return func(*args, **options)


def _without_memory(tensor: torch.Tensor, precision: str) -> torch.Tensor:
    """Returns a tensor without memory, in the dtype that Megatron converts inputs to."""
    # Megatron converts inputs to bfloat16 itself, but only on CPUs and GPUs.
    is_converted = precision == "bf16-mixed" and tensor.dtype == torch.float32
    return tensor.to("meta", torch.bfloat16 if is_converted else tensor.dtype)


class _Stage:
    """This rank's part of the model, built as NeMo's strategy builds it."""

    def __init__(self, module: Any, strategy: Any, layout: Layout) -> None:
        self.module, self.layout = module, layout
        strategy.connect(module)  # writes layout and precision into the model's config
        module.configure_model()
        self.model = module.module
        strategy.precision_plugin.convert_module(module)
        self.is_sharded = bool(strategy.ddp_config.use_distributed_optimizer)
        # Tensor-parallel ranks are neighbours; then data-parallel ranks, or else stages.
        self.stages_first = bool(strategy.use_tp_pp_dp_mapping)

    def run(self, batch: Any, received: Any) -> tuple[int, int, Any]:
        """Runs one micro batch forward and backward.

        Args:
            batch: The micro batch.
            received: The previous stage's output; None on the first stage.

        Returns:
            The bytes of the collectives with tensor-parallel ranks; the bytes sent to neighbouring
            stages; and this stage's output for the next stage, None on the last stage.
        """
        module = self.module
        if received is not None:
            received = torch.empty_like(received, requires_grad=True)
            self.model.set_input_tensor(received)
        with CountCommunication() as counts:
            if parallel_state.is_pipeline_last_stage():
                output = module.training_step(batch)
                reduction = module.training_loss_reduction()
                reduction.setup(batch)
                loss = reduction.forward(batch, output)[0]
                sent = None
            else:
                loss = sent = module.forward_step(batch)
            if loss.requires_grad:  # not if all weights up to this stage are frozen
                loss.backward(torch.empty_like(loss))
        # A stage sends its output to the next stage, and its input's gradient to the previous one.
        num_bytes = sum(tensor.nbytes for tensor in (sent, received) if tensor is not None)
        return counts.total("TENSOR_MODEL_PARALLEL_GROUP"), num_bytes, sent

    def share(self, reduced: int, sent: int) -> Share:
        """Returns this rank's share of the whole job, from the bytes of one micro batch."""
        layout, weights = self.layout, dict(self.model.named_parameters())
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        # Ranks of one data-parallel group are `step` apart.
        step = layout.tensor * (layout.pipeline if self.stages_first else 1)
        first = tensor_rank + stage * layout.tensor * (1 if self.stages_first else layout.data)
        trained = [weight for weight in weights.values() if weight.requires_grad]
        number = sum(weight.numel() for weight in trained)
        originals = sum(w.numel() for w in trained if w.dtype != torch.float32)
        optimizer_bytes = MOMENTS * number + ORIGINAL * originals
        if self.is_sharded:
            optimizer_bytes = -(-optimizer_bytes // layout.data)
        num_micro_batches = layout.global_batch_size // (layout.data * layout.micro_batch_size)
        return Share(
            ranks=range(first, first + step * layout.data, step),
            tensor_rank=tensor_rank,
            pipeline_rank=stage,
            shapes={name: tuple(weight.shape) for name, weight in weights.items()},
            num_parameters=sum(weight.numel() for weight in weights.values()),
            weight_bytes=sum(weight.nbytes for weight in weights.values()),
            gradient_bytes=GRADIENT * number,
            optimizer_bytes=optimizer_bytes,
            tensor_bytes=num_micro_batches * reduced,
            pipeline_bytes=num_micro_batches * sent,
            data_bytes=GRADIENT * number if layout.data > 1 else 0,
        )
