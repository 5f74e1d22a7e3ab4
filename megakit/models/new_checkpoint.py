"""Writes a model, without an optimizer, as a checkpoint that a run could have written."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer import MegatronModule
from nemo.lightning import io

from megakit.checkpoints.context import write_context
from megakit.checkpoints.manifest import CONTEXT, WEIGHTS, Manifest, list_files, write_manifest
from megakit.checkpoints.writer import publish, why_not_written
from megakit.models.config import MegatronBioNeMoTrainableModelConfig
from megakit.models.inference import PARALLEL_SIZES
from megakit.models.loading import PREFIX
from megakit.runtime.saving import write_in_threads


class ImportedModule(io.IOMixin):
    """Takes the place of a Lightning module, whose config NeMo writes into the context.

    Args:
        config: Builds the model.
    """

    def __init__(self, config: MegatronBioNeMoTrainableModelConfig) -> None:
        self.config = config


def for_one_rank(config: MegatronBioNeMoTrainableModelConfig) -> Any:
    """Returns a copy of a config that builds the whole model in float32, from random weights."""
    values: dict[str, Any] = {
        **dict.fromkeys(PARALLEL_SIZES, 1),
        **dict.fromkeys(("fp16", "bf16", "sequence_parallel"), False),
        "virtual_pipeline_model_parallel_size": None,
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
        "initial_ckpt_path": None,
    }
    return dataclasses.replace(config, **values)


def write_new_checkpoint(
    checkpoint: Path,
    model: MegatronModule,
    config: MegatronBioNeMoTrainableModelConfig,
    manifest: Manifest,
) -> None:
    """Writes a checkpoint into a hidden folder, and renames the folder when it is complete.

    Args:
        checkpoint: The folder to create, which does not exist.
        model: The model, on a single rank.
        config: The config that the context contains.
        manifest: The content of the manifest, except the files.

    Raises:
        OSError: The checkpoint cannot be written; nothing is left of it.
    """
    partial = checkpoint.with_name(f".partial-{checkpoint.name}")
    write_in_threads()
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a killed import
        (partial / WEIGHTS).mkdir(parents=True)
        dist_checkpointing.save(model.sharded_state_dict(prefix=PREFIX), str(partial / WEIGHTS))
        write_context(partial / CONTEXT, ImportedModule(config))
        write_manifest(partial, dataclasses.replace(manifest, files=list_files(partial)))
        publish(partial, checkpoint)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if reason := why_not_written(error):
            raise OSError(f"cannot write {checkpoint}: {reason}") from error
        raise
