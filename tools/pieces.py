"""The parts of a model's weights that a rank has, with their places in the whole weights.

Megatron's `sharded_state_dict` and torch's `DTensor` say where each part belongs, under any layout.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

#: Names weights by layer and by expert, where the model's `sharded_state_dict` takes it.
METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": True}
#: In the name of a weight of all layers; otherwise, the layer's number follows.
STACKED = re.compile(r"\blayers\.(?!\d)")


@dataclass(frozen=True)
class Piece:
    """The part of a weight that this rank has.

    Attributes:
        name: Of the whole weight, the same under every layout.
        local: The name of the parameter in this rank's part of the model.
        shape: Of the whole weight.
        offset: Of this part in the whole, by axis.
        sizes: Of this part, by axis.
        parameter: The parameter that contains the part.
        place: Strides and first element of the part in the parameter's storage; None for all of it.
    """

    name: str
    local: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    parameter: nn.Parameter
    place: tuple[tuple[int, ...], int] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this part of a tensor that has the form of the parameter: a gradient."""
        local = tensor.detach()
        local = getattr(local, "_local_tensor", local)  # of a DTensor
        if self.place is None:
            return local
        strides, first = self.place
        return local.reshape(-1).as_strided(self.sizes, strides, first + local.storage_offset())


def pieces_of(models: Sequence[Any]) -> list[Piece]:
    """Returns the parts of all trained weights of this rank's chunks, in the model's order."""
    found: list[Piece] = []
    for model in models:
        while hasattr(model, "module"):  # DistributedDataParallel, Float16Module
            model = model.module
        pieces = _of_megatron(model) if hasattr(model, "sharded_state_dict") else _of_torch(model)
        order = {one: number for number, one in enumerate(model.parameters())}
        trained = [piece for piece in pieces if piece.parameter.requires_grad]
        found += sorted(trained, key=lambda piece: order[piece.parameter])
    return found


def _of_megatron(module: Any) -> Iterator[Piece]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    try:
        state = module.sharded_state_dict(metadata=METADATA)
    except TypeError:  # a method of somebody's own, without this argument
        state = module.sharded_state_dict()
    apply_factories(state)
    names = {one: name for name, one in module.named_parameters()}
    places = [(one.data_ptr(), one.nbytes, one) for one in names]
    for part in nested_values(state):
        if not isinstance(part, ShardedTensor) or not part.data.numel():
            continue
        at = part.data.data_ptr()
        owner = next((one for first, size, one in places if first <= at < first + size), None)
        if owner is None:
            continue  # no weight: a running mean, for example
        name, shape, offset, new = (
            part.key,
            part.global_shape,
            part.global_offset,
            part.prepend_axis_num,
        )
        if new == 1 and STACKED.search(name):  # one tensor has a weight of all layers
            name, new = STACKED.sub(f"layers.{offset[0]}.", name), 0
            shape, offset = shape[1:], offset[1:]
        is_marked = getattr(owner, "tensor_model_parallel", False)
        if is_marked and hasattr(owner, "partition_dim") and part.data.shape == tuple(shape):
            shape, offset = _sharded(owner, shape)  # a ModuleList's state does not say so
        yield Piece(
            name,
            names[owner],
            tuple(shape),
            tuple(offset),
            (1,) * new + tuple(part.data.shape),
            owner,
            ((0,) * new + part.data.stride(), (at - owner.data_ptr()) // owner.element_size()),
        )


def _sharded(parameter: Any, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns whole shape and offset of a parameter by the attributes of Megatron's layers."""
    from megatron.core import parallel_state

    whole, offset, axis = [*shape], [0] * len(shape), parameter.partition_dim
    offset[axis] = whole[axis] * parallel_state.get_tensor_model_parallel_rank()
    whole[axis] *= parallel_state.get_tensor_model_parallel_world_size()
    return whole, offset


def _of_torch(module: nn.Module) -> Iterator[Piece]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for name, parameter in module.named_parameters():
        shape, sizes, offset = (tuple(parameter.shape),) * 2 + ((0,) * parameter.dim(),)
        if isinstance(parameter, DTensor):
            sizes, offset = compute_local_shape_and_global_offset(
                shape, parameter.device_mesh, parameter.placements
            )
        if 0 not in sizes:
            yield Piece(name, name, shape, tuple(offset), tuple(sizes), parameter)


def part_of(whole: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Returns the part of a whole tensor that begins at a place, or less at the whole's end."""
    ends = zip(offset, shape, strict=True)
    return whole[tuple(slice(first, first + size) for first, size in ends)]


def put_together(parts: Iterable[tuple[Any, Tensor]]) -> dict[str, Tensor]:
    """Returns whole tensors from parts, NaN where there is none.

    Args:
        parts: Pairs of a piece as `StepValues` writes it (name, shape, offset...), and its part.
    """
    found: dict[str, Tensor] = {}
    for (name, shape, offset, *_), part in parts:
        if name not in found:
            found[name] = torch.full(shape, torch.nan, dtype=part.dtype)
        part_of(found[name], offset, part.shape).copy_(part)
    return found


@torch.no_grad()
def copy_into(pieces: Sequence[Piece], wholes: dict[str, Tensor]) -> None:
    """Gives this rank's weights the values of whole ones, where these have the same form."""
    for piece in pieces:
        if (whole := wholes.get(piece.name)) is not None and whole.shape == piece.shape:
            own = piece.of(piece.parameter)
            own.copy_(part_of(whole, piece.offset, piece.sizes))


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Returns the gradient that the optimizer uses: of Megatron's buffer, if there is one."""
    buffer = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if buffer is None else buffer
    return gradient.detach() if gradient is not None and parameter.requires_grad else None


def gathered_gradients(models: Sequence[Any]) -> dict[nn.Parameter, Tensor]:
    """Returns a copy of each parameter's gradient.

    With the distributed optimizer, a data-parallel rank has the reduced gradients of its share of a
    buffer only. They are gathered here, so all ranks have to call this.
    """
    found = {}
    for model in models:
        for parameter in model.parameters():
            gradient = gradient_of(parameter)
            if gradient is not None:
                found[parameter] = gradient.clone()
        for buffer in (*_buffers(model, "buffers"), *_buffers(model, "expert_parallel_buffers")):
            if not buffer.ddp_config.use_distributed_optimizer:
                continue
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                parts = [*bucket.grad_data.clone().chunk(group.size())]
                distributed.all_gather(parts, parts[group.rank()].clone(), group=group)
                whole, start = torch.cat(parts), bucket.grad_data.storage_offset()
                for parameter in bucket.params_list:
                    first = parameter.main_grad.storage_offset() - start
                    part = whole[first : first + parameter.numel()]
                    found[parameter] = part.view(parameter.shape)
    return found


def _buffers(model: Any, name: str) -> list[Any]:
    found = getattr(model, name, ())
    return found if isinstance(found, list) else []  # a module's method has the same name
