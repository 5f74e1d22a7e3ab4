"""Loads a checkpoint as a plain torch module, for programs that only predict."""

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megakit.checkpoints.manifest import verify_if_possible
from megakit.checkpoints.model_settings import read_config_class, read_model_settings
from megakit.errors import UserError, reading
from megakit.runtime import find_accelerator, use_accelerator
from megakit.runtime.patching import require_attribute

if TYPE_CHECKING:
    from megakit.nemo.config import MegatronBioNeMoTrainableModelConfig as Config

PARALLEL_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)
#: Fields for precision, parallelism, and compiled functions, of a config for one rank.
ONE_RANK: dict[str, Any] = {
    **dict.fromkeys(PARALLEL_SIZES, 1),
    **dict.fromkeys(("fp16", "bf16", "enable_autocast", "sequence_parallel"), False),
    **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion"), False),
    "masked_softmax_fusion": False,
    "virtual_pipeline_model_parallel_size": None,
    "params_dtype": torch.float32,
    "use_cpu_initialization": True,
}


def load_for_inference(
    checkpoint: str | Path, config: "Config | None" = None, *, device: str | torch.device = "cpu"
) -> torch.nn.Module:
    """Loads a model for prediction only, from a checkpoint of any layout.

    The config builds the model from the checkpoint's settings. Then torch's layers replace
    Megatron's layers, under the same names. The model needs no process group and no parallel state;
    those of a running job are not changed.

    Call `megakit.runtime.use_accelerator` before any code imports Megatron.

    Args:
        checkpoint: A folder such as `runs/finetune/checkpoints/step=000500`.
        config: A MegatronBioNeMoTrainableModelConfig that builds the model. By default the
            checkpoint names its class. For security, a checkpoint cannot cause an import: the
            module of this class must be imported already.
        device: The device of the model.

    Returns:
        The model in evaluation mode, in float32, with frozen weights.

    Raises:
        FileNotFoundError: There is no such folder.
        UserError: The checkpoint is damaged, or of another model; the class that the checkpoint
            names is not imported; or layers have no plain form, which are listed.
    """
    checkpoint = Path(checkpoint)
    use_accelerator(find_accelerator().name)
    from megakit.models.partial_loading import load_model_weights
    from megakit.models.plain import replace_parallel_layers

    verify_if_possible(checkpoint)
    built_by = _config(checkpoint, config)
    with single_rank_state(), torch.random.fork_rng(devices=[]):
        model = built_by.configure_model()
        load_model_weights(model, checkpoint, alone=True)
    replace_parallel_layers(model)
    return model.eval().requires_grad_(False).to(device, torch.float32)


def returns_latent(model: Any) -> bool:
    """Tells whether a model's `forward` has a parameter `return_latent`.

    With `return_latent=True`, such a model returns (output, latent) instead of the output.

    Args:
        model: The model or its class.
    """
    return "return_latent" in inspect.signature(model.forward).parameters


def _config(checkpoint: Path, config: "Config | None") -> "Config":
    """Returns the model's config with the checkpoint's settings, for a model on one rank."""
    from megakit.nemo.config import OVERRIDE_BIONEMO_CONFIG_DEFAULTS

    cls = _config_class(checkpoint) if config is None else type(config)
    kept = OVERRIDE_BIONEMO_CONFIG_DEFAULTS if config is None else config.override_parent_fields
    names = {field.name for field in dataclasses.fields(cls) if field.init} - set(kept)
    values: dict[str, Any] = {
        name: value
        for name, value in read_model_settings(checkpoint).items()
        # A checkpoint has None in place of a function such as `init_method`.
        if name in names and not (value is None and callable(getattr(config or cls, name, None)))
    } | {**ONE_RANK, "initial_ckpt_path": None}
    fit = "They do not fit the class: use the code that wrote them, or another checkpoint."
    with reading(f"{checkpoint}: its settings of {cls.__name__}", fit):
        return cls(**values) if config is None else dataclasses.replace(config, **values)


def _config_class(checkpoint: Path) -> type:
    """Returns the config class that the checkpoint names, if its module is imported."""
    from megakit.nemo.config import MegatronBioNeMoTrainableModelConfig

    module, name = read_config_class(checkpoint)
    found = getattr(sys.modules.get(module), name, None)
    if not (isinstance(found, type) and issubclass(found, MegatronBioNeMoTrainableModelConfig)):
        raise UserError(
            f"{checkpoint}: its config class {name} is not imported from the module {module}, or "
            f"is no {MegatronBioNeMoTrainableModelConfig.__name__}. A checkpoint cannot cause an "
            f"import: if the module is yours, import {module} first."
        )
    return found


class _SingleRankGroup:
    """Replaces a process group of one rank, for code that reads the group's size and rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@contextlib.contextmanager
def single_rank_state() -> Iterator[None]:
    """Sets Megatron's parallel state to that of a job of one rank, and restores it at the end.

    Layers read the parallel state when they are built, to allocate their shard of the weights. Real
    process groups cannot be used here, because all ranks of a running job would have to take part
    in their creation.
    """
    from megatron.core import parallel_state
    from torch import distributed

    state = vars(parallel_state)
    before = {name: state[name] for name in state if name.startswith("_") and name.isupper()}
    for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_MODEL_PARALLEL_GROUP"):
        require_attribute(parallel_state, name)
    # Without torch.distributed, Megatron's layers ignore the groups, and models cannot read sizes.
    needs_world, excepthook = not distributed.is_initialized(), sys.excepthook
    if needs_world:
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        state.update((name, _single_rank_value(name)) for name in before)
        yield
    finally:
        state.update(before)
        if needs_world:
            distributed.destroy_process_group()
            sys.excepthook = excepthook  # torch's adds the rank, once for each job


def _single_rank_value(name: str) -> Any:
    """Returns the value of a variable of Megatron's parallel state in a job of one rank."""
    if "VIRTUAL" in name or "RANKS" in name or "GROUPS" in name:
        return None
    if "_GROUP" in name:
        return _SingleRankGroup()
    return {"SIZE": 1, "RANK": 0}.get(name.rpartition("_")[2])
