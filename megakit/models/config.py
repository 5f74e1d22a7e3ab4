"""The config that builds a model late, from a checkpoint if asked."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from megatron.core.transformer import MegatronModule, TransformerConfig
from nemo.lightning.megatron_parallel import MegatronLossReduction

from megakit.checkpoints.context import read_model_settings
from megakit.checkpoints.manifest import verify_if_possible
from megakit.errors import UserError
from megakit.models.loading import load_model_weights
from megakit.runtime.foreign_files import reading
from megakit.runtime.safe_reading import USE_ANOTHER

ModelT = TypeVar("ModelT", bound=MegatronModule)
MegatronLossType = TypeVar("MegatronLossType", bound=MegatronLossReduction)

#: Fields that belong to this run or machine, so a checkpoint never changes them.
OVERRIDE_BIONEMO_CONFIG_DEFAULTS: list[str] = [
    # what is built, and from which checkpoint
    "model_cls",
    "loss_cls",
    "initial_ckpt_path",
    "initial_ckpt_skip_keys_with_these_prefixes",
    "override_parent_fields",
    "seed",
    # layout
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_comm_backend",
    "variable_seq_lengths",
    "moe_token_dispatcher_type",
    # precision
    "fp16",
    "bf16",
    "params_dtype",
    "pipeline_dtype",
    "autocast_dtype",
    "enable_autocast",
    # set by the strategy while it runs
    "timers",
    "finalize_model_grads_func",
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
]


@dataclass
class MegatronBioNeMoTrainableModelConfig(Generic[ModelT, MegatronLossType], TransformerConfig):
    """Says which model and which loss belong together, and builds the model when asked.

    NeMo's strategy sets up the parallel state first and calls `configure_model` then, because a
    Megatron layer asks at its construction which part of the weights is its own. The strategy
    writes layout and precision into this config, for which it must be a TransformerConfig.

    Attributes:
        model_cls: The class of the model; called with this config.
        loss_cls: The class of the model's loss.
        num_layers: Layers of a transformer. Megatron divides by it, also for other models.
        num_attention_heads: Attention heads; 0 for a model without attention, for which this class
            then satisfies Megatron's checks.
        initial_ckpt_path: A checkpoint to take settings and weights from.
        initial_ckpt_skip_keys_with_these_prefixes: Names of weights, by their beginnings, that are
            not taken from that checkpoint, as a new head's. Any other difference is an error.
        override_parent_fields: Fields that keep the value they have here, whatever the
            checkpoint's settings say.
        seed: Decides the first weights.
    """

    model_cls: type[ModelT] | None = None
    loss_cls: type[MegatronLossType] | None = None
    num_layers: int = 1
    num_attention_heads: int = 0
    initial_ckpt_path: str | None = None
    initial_ckpt_skip_keys_with_these_prefixes: set[str] = field(default_factory=set)
    override_parent_fields: list[str] = field(
        default_factory=lambda: list(OVERRIDE_BIONEMO_CONFIG_DEFAULTS)
    )
    seed: int = 42
    # Weights are made on the CPU, so that they do not depend on the device or the layout.
    use_cpu_initialization: bool = True

    def __post_init__(self) -> None:
        # The strategy calls this again once it has written its layout into the config.
        self._has_attention = getattr(self, "_has_attention", self.num_attention_heads != 0)
        if not self._has_attention:
            # Megatron demands a multiple of the number of tensor-parallel ranks, also for a model
            # without attention.
            self.num_attention_heads = self.num_query_groups = self.tensor_model_parallel_size
        if self.pipeline_model_parallel_size > 1:
            # Stages then tell each other the shape of what they send, instead of working it out
            # for tokens; Megatron allows that only with this (else unused) dispatcher.
            self.variable_seq_lengths = True
            self.moe_token_dispatcher_type = "alltoall"
        super().__post_init__()

    def configure_model(self) -> ModelT:
        """Builds the model: settings from the checkpoint first, then the model, then its weights.

        Returns:
            This rank's part of the model, in float32 on the CPU.
        """
        if self.model_cls is None:
            raise ValueError(f"{type(self).__name__} needs a model_cls: the class it shall build.")
        own = dict(vars(self))
        if self.initial_ckpt_path:
            self.load_settings_from_checkpoint(self.initial_ckpt_path)
        changed = sorted(name for name, value in vars(self).items() if own.get(name) != value)
        model = self._build(changed)
        if self.initial_ckpt_path:
            self.update_model_from_checkpoint(model, self.initial_ckpt_path)
        return model

    def _build(self, changed: list[str]) -> ModelT:
        """Builds the model; if that fails with settings of a checkpoint, the checkpoint is bad."""
        assert self.model_cls is not None
        if not changed:
            return self.model_cls(self)
        with reading(f"{self.initial_ckpt_path}: its settings {', '.join(changed)}", USE_ANOTHER):
            return self.model_cls(self)

    def get_loss_reduction_class(self) -> type[MegatronLossType]:
        """Returns the class of the model's loss.

        Raises:
            NotImplementedError: The config names no `loss_cls`.
        """
        if self.loss_cls is None:
            raise NotImplementedError(
                f"{type(self).__name__}.get_loss_reduction_class: set loss_cls, the class of the "
                "model's loss."
            )
        return self.loss_cls

    def validation_metrics(self) -> dict[str, Any]:
        """Names this model's `megakit.training.ValidationMetric`s; a subclass may have some."""
        return {}

    def load_settings_from_checkpoint(self, initial_ckpt_path: str | Path) -> None:
        """Takes over the settings a checkpoint was saved with, but for `override_parent_fields`.

        Raises:
            UserError: The checkpoint is damaged, or its context is missing or names something
                untrusted. One without a manifest, as NeMo writes it, is taken with a warning.
        """
        verify_if_possible(Path(initial_ckpt_path))
        settings = read_model_settings(Path(initial_ckpt_path))
        kept = set(self.override_parent_fields)
        for name in {own.name for own in fields(self)} & settings.keys() - kept:
            own, found = getattr(self, name), settings[name]
            if callable(own):  # such as one for first weights; a checkpoint never names another
                continue
            wanted: tuple[type, ...] = (bool,) if type(own) is bool else (int, float)
            if type(own) in (bool, int, float) and type(found) not in (*wanted, type(None)):
                raise UserError(
                    f"{initial_ckpt_path}: its setting {name} is {str(found)[:100]!r}, "
                    f"not a {type(own).__name__}. {USE_ANOTHER}"
                )
            setattr(self, name, found)

    def update_model_from_checkpoint(
        self, model: torch.nn.Module, initial_ckpt_path: str | Path
    ) -> list[str]:
        """Loads weights into the model, but for those whose names begin with a skipped prefix.

        Returns:
            The names of the model's weights that were skipped.

        Raises:
            UserError: Another weight is missing, left over, or of another shape; all are listed.
        """
        return load_model_weights(
            model, Path(initial_ckpt_path), skip=self.initial_ckpt_skip_keys_with_these_prefixes
        )
