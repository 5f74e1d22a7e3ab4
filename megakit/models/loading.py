"""Loads a checkpoint's weights into a model, all weights or all except for some names."""

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

from megakit.checkpoints.manifest import WEIGHTS
from megakit.errors import USE_ANOTHER, UserError, reading
from megakit.models.finite import check_finite
from megakit.runtime.safe_reading import refusal_of

#: NeMo's strategy saves the model as the attribute `module` of its LightningModule.
PREFIX = "module."


def load_model_weights(
    model: MegatronModule, checkpoint: Path, skip: Collection[str] = (), *, alone: bool = False
) -> list[str]:
    """Loads a checkpoint's weights into a model of any layout, on the model's device.

    Args:
        model: This rank's part of the model.
        checkpoint: The folder that contains `weights/`.
        skip: Prefixes of names. Without prefixes, model and checkpoint must have the same weights.
            With prefixes, the model's weights with these prefixes are not changed, and the
            checkpoint may contain further weights, such as those of a replaced head.
        alone: Whether to read without communication. If False, all ranks of the job must call this
            function.

    Returns:
        The names of the weights, of the model or the checkpoint, that were not loaded.

    Raises:
        UserError: Weights are missing, unexpected, or of other shapes; all of them are listed. Or
            weights are not finite.
    """
    folder = str(checkpoint / WEIGHTS)
    wanted = model.sharded_state_dict(prefix=PREFIX)
    skipped = {key for key in wanted if key.removeprefix(PREFIX).startswith(tuple(skip))}
    wanted = {key: tensor for key, tensor in wanted.items() if key not in skipped}
    tensors = _tensors(load_preprocess(wanted)[0])

    with reading(folder, USE_ANOTHER):
        saved = dist_checkpointing.load_tensors_metadata(folder)
    saved = {key: tensor for key, tensor in saved.items() if key.startswith(PREFIX)}
    left_over = saved.keys() - {tensor.key for _, tensor in tensors}
    problems = [
        f"{_name(key)}: not in the checkpoint" for key, tensor in tensors if tensor.key not in saved
    ]
    problems += [
        f"{_name(key)}: shape {tuple(tensor.global_shape)} in the model, "
        f"{tuple(saved[tensor.key].global_shape)} in the checkpoint"
        for key, tensor in tensors
        if tensor.key in saved and saved[tensor.key].global_shape != tensor.global_shape
    ]
    if not skip and model.config.pipeline_model_parallel_size == 1:
        # With several pipeline stages, this stage lacks the weights of the other stages.
        problems += [f"{_name(key)}: not in the model" for key in left_over]
    if problems:
        raise UserError(
            f"{checkpoint}: its weights do not fit {type(model).__name__}:\n  "
            + "\n  ".join(sorted(problems))
            + "\nUse a checkpoint of this model. If layers are new, add their prefixes "
            "to initial_ckpt_skip_keys_with_these_prefixes."
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
    """Returns the result of Megatron's `load` in a job of one rank, without communication.

    Megatron's `load` communicates with all ranks. It is based on torch's reader, which does not
    need communication and is used here.
    """
    wanted, _, factories = load_preprocess(wanted)
    # Megatron can store the weights of all layers as one tensor. So whole tensors are read first.
    whole = read_tensors(folder, {tensor.key for _, tensor in _tensors(wanted)})

    def part(item: object) -> object:
        return whole[item.key][item.global_slice()] if isinstance(item, ShardedTensor) else item

    return apply_factory_merges(dict_list_map_outplace(part, wanted), factories)


def read_tensors(folder: str, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Reads whole tensors, saved under any layout, without torch.distributed.

    Args:
        folder: The folder with the file `.metadata`.
        keys: The tensors to read; by default the tensors of the model.

    Raises:
        UserError: The checkpoint is damaged or unsafe.
    """
    reader = strategies.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    if keys is None:
        keys = [key for key in saved if key.startswith(PREFIX) and hasattr(saved[key], "size")]
    for key in keys:  # check before allocating memory for the whole tensor
        stored = sum(math.prod(chunk.sizes) for chunk in saved[key].chunks)
        if stored < (wanted := math.prod(saved[key].size)):
            with reading(folder, USE_ANOTHER):
                raise ValueError(f"{key} has {stored:,} of {wanted:,} numbers")
    whole = {key: torch.empty(saved[key].size, dtype=saved[key].properties.dtype) for key in keys}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # unavailable, as intended
            load(whole, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise refusal_of(folder, error) from error
    return whole


def _tensors(sharded: dict[str, Any]) -> list[tuple[str, ShardedTensor]]:
    """Lists names and tensors; a name occurs several times if Megatron stores it in parts."""
    named = [
        (key, item)
        for key, value in sharded.items()
        for item in (nested_values(value) if isinstance(value, dict | list) else [value])
    ]
    return [(key, item) for key, item in named if isinstance(item, ShardedTensor)]


def _name(key: str) -> str:
    return key.removeprefix(PREFIX)


def num_parameters(model: torch.nn.Module) -> int:
    """Returns the number of trainable parameters on this rank."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
