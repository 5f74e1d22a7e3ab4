"""Loads a checkpoint's weights into a model, all weights or all except for some names."""

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.transformer import MegatronModule
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megakit.checkpoints.manifest import WEIGHTS
from megakit.errors import USE_ANOTHER, UserError, reading
from megakit.runtime.safe_reading import first_failure

#: NeMo's strategy saves the model as the attribute `module` of its LightningModule.
PREFIX = "module."


def load_model_weights(
    model: MegatronModule, checkpoint: Path, skip: Collection[str] = (), *, alone: bool = False
) -> list[str]:
    """Loads a checkpoint's weights into a model of any layout; returns the names not loaded.

    Missing, unexpected and misshaped weights raise one `UserError`, and so does NaN or infinity.

    Args:
        model: This rank's part of the model.
        checkpoint: The folder that contains `weights/`.
        skip: Prefixes of names of weights that are not changed. With prefixes, the checkpoint may
            also contain further weights, such as those of a replaced head.
        alone: Whether to read without communication; otherwise all ranks have to call this.
    """
    folder = str(checkpoint / WEIGHTS)
    wanted = model.sharded_state_dict(prefix=PREFIX)
    skipped = {key for key in wanted if _name(key).startswith(tuple(skip))}
    wanted = {key: value for key, value in wanted.items() if key not in skipped}
    # Megatron stores a weight of all transformer layers as one tensor, with one key.
    tensors = {tensor.key: tensor for tensor in _tensors(load_preprocess(wanted)[0])}
    # Megatron's own function for this fails with torch 2.15.
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    saved = {key: one for key, one in described.items() if isinstance(one, TensorStorageMetadata)}
    left_over = {key for key in saved if key.startswith(PREFIX)} - tensors.keys()
    problems = [f"{_name(key)}: not in the checkpoint" for key in tensors.keys() - saved.keys()]
    problems += [
        f"{_name(key)}: shape {tuple(tensor.global_shape)} in the model, "
        f"{tuple(saved[key].size)} in the checkpoint"
        for key, tensor in tensors.items()
        if key in saved and tuple(saved[key].size) != tensor.global_shape
    ]
    if not skip and model.config.pipeline_model_parallel_size == 1:
        # With several pipeline stages, this stage lacks the weights of the other stages.
        problems += [f"{_name(key)}: not in the model" for key in left_over]
    if problems:
        raise UserError(
            f"{checkpoint}: its weights do not fit {type(model).__name__}:\n  "
            + "\n  ".join(sorted(problems))
            + "\nUse a checkpoint of this model. If layers are new, add their prefixes "
            "to initial_ckpt_skip_keys_with_these_prefixes (without NeMo: `skip`)."
        )
    loaded = _read_alone(wanted, folder) if alone else dist_checkpointing.load(wanted, folder)
    with reading(folder, USE_ANOTHER):
        # Not of other state: before the first validation, the best value is infinite.
        check_finite({key: loaded.get(key) for key in wanted})
    found = {_name(key): loaded[key] for key in wanted if torch.is_tensor(loaded.get(key))}
    model.load_state_dict(found, strict=False)
    return sorted(map(_name, skipped | left_over))


def _read_alone(wanted: dict[str, Any], folder: str) -> dict[str, Any]:
    """Returns the result of Megatron's `load` without communication, by torch's reader."""
    wanted, _, factories = load_preprocess(wanted)
    reader = FileSystemReader(folder)
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    # Whole tensors, because Megatron stores a weight of all transformer layers as one tensor.
    whole = {
        tensor.key: torch.empty(saved[tensor.key].size, dtype=saved[tensor.key].properties.dtype)
        for tensor in _tensors(wanted)
    }
    with first_failure(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # unavailable, as intended
        load(whole, storage_reader=reader, no_dist=True)

    def part(item: object) -> object:
        return whole[item.key][item.global_slice()] if isinstance(item, ShardedTensor) else item

    return apply_factory_merges(dict_list_map_outplace(part, wanted), factories)


def _name(key: str) -> str:
    return key.removeprefix(PREFIX)


def _tensors(sharded: dict[str, Any]) -> list[ShardedTensor]:
    return [item for item in nested_values(sharded) if isinstance(item, ShardedTensor)]


def check_finite(value: object) -> None:
    """Raises a ValueError if a tensor in nested containers contains NaN or infinity."""
    if isinstance(value, torch.Tensor):
        has_fractions = value.is_floating_point() or value.is_complex()
        # The sum is read 15 times as fast, but finite values may have one that is not.
        if has_fractions and not (value.sum().isfinite() or value.isfinite().all()):
            raise ValueError("it contains weights that are NaN or infinite")
    elif isinstance(value, dict) and value.get("padding") is True:
        return  # of a bucket, in Megatron's format `dp_reshardable`: memory that was never written
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            check_finite(part)
