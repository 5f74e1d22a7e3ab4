"""Loading a checkpoint's weights into a model, all of them or all but a part."""

import math
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.transformer import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from megakit.checkpoints.folders import weights_folder
from megakit.errors import UserError
from megakit.models.finite import check_finite
from megakit.runtime.foreign_files import reading
from megakit.runtime.safe_reading import USE_ANOTHER, refusal_of

#: NeMo's strategy saves the model as the attribute `module` of its LightningModule.
PREFIX = "module."


def load_model_weights(
    model: MegatronModule, checkpoint: Path, skip: Collection[str] = (), *, alone: bool = False
) -> list[str]:
    """Loads a checkpoint's weights into a model of any layout, on the model's device.

    Args:
        model: This rank's part of the model.
        checkpoint: The folder that holds `weights/`.
        skip: Beginnings of names. With none, model and checkpoint have to hold the same weights.
            With some, those weights of the model stay as they are, and the checkpoint may hold
            further weights, as those of the head that is being replaced.
        alone: Reads without a word to the job's other ranks; else all of them have to call this.

    Returns:
        The weights of either side that were not loaded, named.

    Raises:
        UserError: Weights are missing, left over, or of other shapes; all of them are listed. Or
            some are not finite.
    """
    folder = str(weights_folder(checkpoint))
    wanted = model.sharded_state_dict(prefix=PREFIX)
    skipped = {key for key in wanted if key.removeprefix(PREFIX).startswith(tuple(skip))}
    wanted = {key: tensor for key, tensor in wanted.items() if key not in skipped}
    tensors = _tensors(load_preprocess(wanted)[0])

    with reading(folder, USE_ANOTHER):
        saved = dist_checkpointing.load_tensors_metadata(folder)
    saved = {key: tensor for key, tensor in saved.items() if key.startswith(PREFIX)}
    left_over = saved.keys() - {tensor.key for _, tensor in tensors}
    problems = [
        f"{_name(key)}: the model has it, the checkpoint has not"
        for key, tensor in tensors
        if tensor.key not in saved
    ]
    problems += [
        f"{_name(key)}: shape {tuple(tensor.global_shape)} in the model, "
        f"{tuple(saved[tensor.key].global_shape)} in the checkpoint"
        for key, tensor in tensors
        if tensor.key in saved and saved[tensor.key].global_shape != tensor.global_shape
    ]
    if not skip and model.config.pipeline_model_parallel_size == 1:
        # One stage of a pipeline has but a part of the weights; the others have the rest.
        problems += [f"{_name(key)}: the checkpoint has it, the model has not" for key in left_over]
    if problems:
        raise UserError(
            f"{checkpoint}: its weights do not fit {type(model).__name__}:\n  "
            + "\n  ".join(sorted(problems))
            + "\nChoose a checkpoint of this model, or name the layers that shall start anew."
        )
    with reading(folder, USE_ANOTHER):
        loaded = _read_alone(wanted, folder) if alone else dist_checkpointing.load(wanted, folder)
        check_finite(loaded)
    model.load_state_dict(
        {_name(key): loaded[key] for key in wanted if torch.is_tensor(loaded.get(key))},
        strict=False,
    )
    return sorted(_name(key) for key in skipped | left_over)


def _read_alone(wanted: dict[str, Any], folder: str) -> dict[str, Any]:
    """What Megatron's `load` gives a job of one rank, without torch.distributed.

    Megatron's asks all ranks for what they read. Below it is torch's reader, which need not.
    """
    wanted, _, factories = load_preprocess(wanted)
    # A layer's weights can be a part of one tensor with those of all layers: hence the whole first.
    whole = read_tensors(folder, {tensor.key for _, tensor in _tensors(wanted)})

    def part(item: Any) -> Any:
        return whole[item.key][item.global_slice()] if isinstance(item, ShardedTensor) else item

    return apply_factory_merges(dict_list_map_outplace(part, wanted), factories)


def read_tensors(folder: str, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Reads whole tensors, whatever layout they were saved under, without torch.distributed.

    Args:
        folder: The one with `.metadata`.
        keys: The tensors to read; by default the model's.

    Raises:
        UserError: The checkpoint is damaged or not to be trusted.
    """
    reader = strategies.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    if keys is None:
        keys = [key for key in saved if key.startswith(PREFIX) and hasattr(saved[key], "size")]
    for key in keys:  # before memory is allocated for the whole tensor
        stored = sum(math.prod(chunk.sizes) for chunk in saved[key].chunks)
        if stored < (wanted := math.prod(saved[key].size)):
            with reading(folder, USE_ANOTHER):
                raise ValueError(f"{key} has {stored:,} of {wanted:,} numbers")
    whole = {key: torch.empty(saved[key].size, dtype=saved[key].properties.dtype) for key in keys}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # just as it is meant
            load(whole, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise refusal_of(folder, error) from error
    return whole


def _tensors(sharded: dict[str, Any]) -> list[tuple[str, ShardedTensor]]:
    """The tensors by their names; a name has several where Megatron stores a weight in parts."""
    named = [
        (key, item)
        for key, value in sharded.items()
        for item in (nested_values(value) if isinstance(value, dict | list) else [value])
    ]
    return [(key, item) for key, item in named if isinstance(item, ShardedTensor)]


def _name(key: str) -> str:
    return key.removeprefix(PREFIX)


def num_parameters(model: torch.nn.Module) -> int:
    """How many numbers this rank trains."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
