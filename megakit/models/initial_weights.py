"""Refuses models whose initial weights depend on the pipeline layout."""

from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from megakit.errors import UserError

ModelT = TypeVar("ModelT", bound=nn.Module)
ValueT = TypeVar("ValueT")

#: Number of names in the error message.
NUM_NAMES = 4


def build_independent_of_layout(
    build: Callable[[], ModelT], drawn: Collection[str] = ("",)
) -> ModelT:
    """Builds a model; in a pipeline, checks that its weights do not depend on the stage.

    NeMo seeds each pipeline stage differently. A layer that draws weights from torch's generator
    therefore has different initial weights in each layout. `seeded` restores the generator. So, if
    a model has changed the generator, a second model is built and compared with the first. All
    ranks build a second model if one rank does, since the constructor may communicate.

    Args:
        build: Builds this rank's part of the model.
        drawn: Prefixes of the names of the weights that no checkpoint replaces.

    Raises:
        UserError: Weights depend on the layout; all ranks raise the same error.
    """
    before = _generator_states()
    model = build()
    if not _is_pipeline() or not any(_of_all_ranks(not _are_equal(before, _generator_states()))):
        return model
    names = (name for name in _differences(model, build) if name.startswith(tuple(drawn)))
    found = list(dict.fromkeys(chain.from_iterable(_of_all_ranks(list(names)))))
    if found:
        others = f" and {len(found) - NUM_NAMES} others" if len(found) > NUM_NAMES else ""
        raise UserError(
            f"{type(model).__name__}: the initial weights of {', '.join(found[:NUM_NAMES])}{others}"
            " depend on the layout, because each pipeline stage draws different random numbers. "
            'Create layers inside `with seeded(config.seed, "name"):`, transformer layers by '
            "`transformer_block_spec`, and a GPTModel as `SeededGPTModel`, all of megakit.models."
        )
    return model


def _is_pipeline() -> bool:
    return (
        parallel_state.is_initialized()
        and parallel_state.get_pipeline_model_parallel_world_size() > 1
    )


def _generator_states() -> list[Tensor]:
    """Returns the states of torch's generators and of Megatron's, from which layers draw."""
    states = [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]
    return states + ([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])


def _are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _differences(model: nn.Module, build: Callable[[], nn.Module]) -> Iterator[str]:
    """Yields the names of weights that differ in a second model; restores the generators."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        # The generators' states have changed, so the second model gets other random numbers.
        second = dict(_weights(build()))
    tracker.set_states(states)
    for name, weight in _weights(model):
        if not torch.equal(weight, second[name]):
            yield name


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _of_all_ranks(value: ValueT) -> list[ValueT]:
    """Gathers a value from each rank of the job."""
    if torch.distributed.get_backend() == "fake":
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
