"""Turns the weights of another program into a checkpoint that any layout loads."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakit.checkpoints import manifest as manifests
from megakit.errors import UserError, reading
from megakit.runtime import find_accelerator, use_accelerator

if TYPE_CHECKING:
    from torch import Tensor

    from megakit.nemo.config import MegatronBioNeMoTrainableModelConfig as Config


def checkpoint_from_weights(
    weights: "Mapping[str, Tensor]", config: "Config", output: str | Path
) -> Path:
    """Writes a checkpoint with the weights of another program; returns its path.

    Call this in a process that is not a rank of a job.

    Args:
        weights: All tensors of the model, with the names and shapes of
            `load_for_inference(...).state_dict()`.
        config: Builds the model. The checkpoint's context gets its fields.
        output: The checkpoint, a folder that does not exist.

    Raises:
        UserError: `output` exists, or the weights do not fit the model, or are not finite. Nothing
            is written then.
    """
    output = Path(output)
    if output.exists():
        raise UserError(f"{output} exists. Name a new folder.")
    use_accelerator(find_accelerator().name)
    from megakit.models.partial_loading import check_finite
    from megakit.nemo.inference import ONE_RANK, single_rank_state

    with reading("the state dict", "Give finite weights."):
        check_finite(dict(weights))
    with single_rank_state():
        model = dataclasses.replace(config, **ONE_RANK).configure_model()
        # Megatron's layers also have entries without a tensor.
        extra = {name: value for name, value in model.state_dict().items() if value is None}
        try:
            model.load_state_dict({**extra, **weights})
        except RuntimeError as error:
            raise UserError(f"{error}\nRename the entries of the state dict.") from error
        _write(output, model, config)
    return output


def _write(checkpoint: Path, model: Any, config: "Config") -> None:
    """Writes a checkpoint into a hidden folder, and renames the folder when it is complete."""
    from megatron.core import dist_checkpointing

    from megakit.models.partial_loading import PREFIX
    from megakit.nemo.recorded_settings import ImportedModule
    from megakit.nemo.writer import write_context
    from megakit.runtime.atomic_files import publish
    from megakit.runtime.writer_threads import write_in_threads

    partial = checkpoint.with_name(f".partial-{checkpoint.name}")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed import
    weights = partial / manifests.WEIGHTS
    weights.mkdir(parents=True)
    write_in_threads()
    dist_checkpointing.save(model.sharded_state_dict(prefix=PREFIX), str(weights))
    write_context(partial / manifests.CONTEXT, ImportedModule(config))
    manifest = manifests.Manifest(
        manifests.IMPORTED,
        type(model).__name__,
        dataset="",  # unknown; scripts then choose as without a checkpoint
        step=manifests.step_in_name(checkpoint) or 0,
        run={},
        versions=manifests.installed_versions(),
        files=manifests.list_files(partial),
    )
    manifests.write_manifest(partial, manifest)
    publish(partial, checkpoint)
