"""Looks at a training before its first step: its size, and warnings about the user's code."""

import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megakit.data.batches import fetch_batch, fetch_samples, has_get_batch
from megakit.data.generators import generator_states
from megakit.errors import printable
from megakit.job.console import Console
from megakit.job.identity import project_of


def show_warnings(console: Console) -> None:
    """Shows warnings about the project's own code also on the console, each place once.

    All warnings are in the log; with `--verbose`, the log is the console.
    """
    root, log = project_of(Path(sys.argv[0])), warnings.showwarning
    shown = set[str]()

    def show(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
        log(message, category, filename, lineno, *more)
        path = Path(filename).resolve()
        place = f"{path.name}, line {lineno}"
        is_own = path.is_relative_to(root) and path.suffix == ".py"
        is_own = is_own and not {"site-packages", "megakit"} & {*path.parts}
        if is_own and category in (UserWarning, RuntimeWarning) and place not in shown:
            shown.add(place)
            console.error(printable(f"Warning: {place}: {message}"))

    if console.is_diverted:
        warnings.showwarning = show  # type: ignore[assignment]  # Python calls it by position


def say_size_and_warnings(
    console: Console, model: torch.nn.Module, dataset: Any, max_steps: int, batch_size: int
) -> None:
    """Prints the size of a training, and warnings; every rank has to call this function.

    Args:
        console: Prints the lines.
        model: This rank's part of the model.
        dataset: The training samples; None if this process must not read any.
        max_steps: Optimizer steps.
        batch_size: Samples of a step, over all ranks.
    """
    console.say(
        f"  {parameters_of_the_job(model):,} parameters, "
        f"{max_steps:,} steps of {batch_size:,} samples"
    )
    if dataset is not None and (names := generators_changed_by(dataset)):
        console.say(
            f"Warning: reading a training sample changes the global generator of "
            f"{' and '.join(names)}, so a resumed run and other ranks may read other samples. "
            "Take random numbers from megakit.data, see docs/data.md#random-effects."
        )
    for one, other in equal_weights(model):
        console.say(
            f"Warning: {one} and {other}, of two pipeline stages, begin equal, and each is "
            "trained alone. To tie them, see docs/adapting.md#what-to-change-for."
        )


def generators_changed_by(dataset: Any) -> list[str]:
    """Returns the global generators from which a sample of a dataset draws."""
    before = generator_states()
    # Not collated, which a data module may do in its own way.
    fetch = fetch_batch if has_get_batch(type(dataset)) else fetch_samples
    fetch(dataset, np.zeros(1, np.int64))
    after = generator_states()
    return [name for name in before if before[name] != after[name]]


def equal_weights(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Returns weights that two pipeline stages begin with, and that Megatron does not keep equal.

    Every rank has to call this function. The first values are compared.
    """
    if (num_stages := parallel_state.get_pipeline_model_parallel_world_size()) == 1:
        return []
    own: dict[Any, str] = {}
    for name, weight in model.named_parameters():
        values = tuple(weight.detach().flatten()[:64].tolist())
        is_alone = weight.requires_grad and not getattr(weight, "shared_embedding", False)
        if is_alone and len(set(values)) > 1:
            own[weight.shape, values] = name.replace("module.", "")
    stages = [own] * num_stages
    group = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.all_gather_object(stages, own, group)
    pairs = itertools.combinations(stages, 2)
    return [(one[key], other[key]) for one, other in pairs for key in one.keys() & other.keys()]


def parameters_of_the_job(model: torch.nn.Module) -> int:
    """Returns the number of trained parameters of the whole model; every rank has to call it.

    Tied weights count once: under pipelines, Megatron marks the last stage's copy of an embedding.
    """
    own = sum(
        weight.numel()
        for weight in model.parameters()
        if weight.requires_grad
        and param_is_not_shared(weight)
        and param_is_not_tensor_parallel_duplicate(weight)
    )
    total = torch.tensor(own, device=next(model.parameters()).device)
    torch.distributed.all_reduce(total, group=parallel_state.get_model_parallel_group())
    return int(total)
