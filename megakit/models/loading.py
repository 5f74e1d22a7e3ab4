"""Loading a checkpoint's weights into a model, all of them or all but a part."""

from collections.abc import Collection
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer import MegatronModule

from megakit.checkpoints.layout import weights_folder
from megakit.errors import UserError

#: NeMo's strategy saves the model as the attribute `module` of its LightningModule.
PREFIX = "module."


def load_model_weights(
    model: MegatronModule, checkpoint: Path, skip: Collection[str] = ()
) -> list[str]:
    """Loads a checkpoint's weights into a model of any layout, on the model's device.

    Args:
        model: This rank's part of the model.
        checkpoint: The folder that holds `weights/`.
        skip: Beginnings of names. With none, model and checkpoint have to hold the same weights.
            With some, those weights of the model stay as they are, and the checkpoint may hold
            further weights, as those of the head that is being replaced.

    Returns:
        The weights of either side that were not loaded, named.

    Raises:
        UserError: Weights are missing, left over, or of other shapes; all of them are listed.
    """
    folder = str(weights_folder(checkpoint))
    wanted = model.sharded_state_dict(prefix=PREFIX)
    skipped = {key for key in wanted if key.removeprefix(PREFIX).startswith(tuple(skip))}
    wanted = {key: tensor for key, tensor in wanted.items() if key not in skipped}
    tensors = {key: tensor for key, tensor in wanted.items() if isinstance(tensor, ShardedTensor)}

    saved = dist_checkpointing.load_tensors_metadata(folder)
    saved = {key: tensor for key, tensor in saved.items() if key.startswith(PREFIX)}
    left_over = saved.keys() - {tensor.key for tensor in tensors.values()}
    problems = [
        f"{_name(key)}: the model has it, the checkpoint has not"
        for key, tensor in tensors.items()
        if tensor.key not in saved
    ]
    problems += [
        f"{_name(key)}: shape {tuple(tensor.global_shape)} in the model, "
        f"{tuple(saved[tensor.key].global_shape)} in the checkpoint"
        for key, tensor in tensors.items()
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
    loaded = dist_checkpointing.load(wanted, folder)
    model.load_state_dict(
        {key.removeprefix(PREFIX): loaded[key] for key in tensors if key in loaded}, strict=False
    )
    return sorted(_name(key) for key in skipped | left_over)


def _name(key: str) -> str:
    return key.removeprefix(PREFIX)


def num_parameters(model: torch.nn.Module) -> int:
    """How many numbers this rank trains."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
