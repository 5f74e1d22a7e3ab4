"""Records a step of somebody's own loop for `check`: with torch's DDP, FSDP2, or another kind.

    with record(model) as step:          # the forward and backward pass, and optimizer.step()
        step.read(batch)
        loss = ...
        loss.backward()
        step.loss(loss)
        optimizer.step()

`check PROGRAM.py` starts the program, and ends it after the steps that it wants; without `check`,
nothing is recorded. A program that calls Megatron's schedule needs no such lines.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, distributed, nn

from .step_values import StepValues

#: What `check` records next: pairs of values, and whether they are the last. Empty without it.
recordings: list[tuple[StepValues, bool]] = []


class Recording:
    """What a loop tells of its step."""

    def __init__(self, values: StepValues | None) -> None:
        self.values, self.losses = values, list[tuple[float, int]]()

    def read(self, batch: Any) -> None:
        """Notes the samples of a micro batch, which are the rows of its tensors."""
        if self.values is not None:
            self.values.read(batch)

    def loss(self, loss: Tensor) -> None:
        """Notes a loss whose gradient was taken; those of several micro batches are added."""
        self.losses.append((float(loss.detach()), 0))


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[Recording]:
    """Records what is computed inside the block, which is one training step.

    Args:
        model: The model, wrapped or not, whose first weights `check` may replace.
    """
    values, is_last = recordings.pop(0) if recordings else (None, False)
    step = Recording(values)
    if values is not None:
        values.begin([model])
    yield step
    if values is not None:
        place = place_of(model)
        values.end(
            place=place,
            losses=step.losses,
            counts=[],
            events=[],
            experts=None,
            sequence=False,
            balances=False,
        )
        if is_last:
            if distributed.is_initialized():
                distributed.barrier()
            sys.stdout.flush()
            os._exit(0)


def place_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Returns this rank's coordinates: by the names of a mesh's axes, else it is data parallel."""
    place = {word: (0, 1) for word in ("tensor", "context", "data", "expert", "stage")}
    if distributed.is_initialized():
        place["data"] = distributed.get_rank(), distributed.get_world_size()
    meshes: list[Any] = [getattr(one, "device_mesh", None) for one in model.parameters()]
    mesh: Any = next((one for one in meshes if one is not None and one.mesh_dim_names), None)
    words = {"tp": "tensor", "tensor": "tensor", "cp": "context", "context": "context"}
    for name in mesh.mesh_dim_names if mesh is not None else ():
        if word := words.get(name):
            size = mesh[name].size()
            place[word] = mesh.get_local_rank(name), size
            rank, ranks = place["data"]
            place["data"] = rank // size, ranks // size  # these axes of a mesh are the inner ones
    return place
