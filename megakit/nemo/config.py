"""Defines the config that builds a model, with settings and weights of a checkpoint if given."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from megatron.core.transformer import MegatronModule, TransformerConfig
from nemo.lightning.megatron_parallel import MegatronLossReduction

from megakit.checkpoints.manifest import verify_if_possible
from megakit.checkpoints.model_settings import read_model_settings
from megakit.models.partial_loading import load_model_weights

ModelT = TypeVar("ModelT", bound=MegatronModule)
MegatronLossType = TypeVar("MegatronLossType", bound=MegatronLossReduction)

#: Fields that depend on the run or the machine. Their values are never read from a checkpoint.
OVERRIDE_BIONEMO_CONFIG_DEFAULTS: list[str] = [
    *("model_cls", "loss_cls", "calculate_per_token_loss", "override_parent_fields", "seed"),
    *("initial_ckpt_path", "initial_ckpt_skip_keys_with_these_prefixes"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_comm_backend"),
    *("variable_seq_lengths", "moe_token_dispatcher_type", "batch_p2p_sync"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("fp16", "bf16", "params_dtype", "pipeline_dtype", "autocast_dtype", "enable_autocast"),
    *("timers", "finalize_model_grads_func", "grad_scale_func"),  # set by the strategy
    *("no_sync_func", "grad_sync_func", "param_sync_func"),
]


@dataclass
class MegatronBioNeMoTrainableModelConfig(Generic[ModelT, MegatronLossType], TransformerConfig):
    """Names a model class and its loss class, and builds the model in `configure_model`.

    NeMo's strategy first sets up the parallel state, and writes layout and precision into this
    config. Then it calls `configure_model`, since layers allocate this rank's shard of the weights.

    Attributes:
        model_cls: The class of the model; called with this config.
        loss_cls: The class of the model's loss.
        num_layers: Layers of a transformer. Megatron divides by this number for all models.
        num_attention_heads: Attention heads; 0 for a model without attention.
        initial_ckpt_path: A checkpoint with the settings and the initial weights.
        initial_ckpt_skip_keys_with_these_prefixes: Prefixes of names of weights that are not loaded
            from the checkpoint, such as the weights of a new head. Any other difference between
            model and checkpoint is an error.
        override_parent_fields: Fields that are not read from the checkpoint's settings.
        seed: Seed of the initial weights.
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
    # Weights are initialized on the CPU, so that they do not depend on the device or the layout.
    use_cpu_initialization: bool = True

    def __post_init__(self) -> None:
        # The strategy calls this method again after it has written its layout into the config.
        self._has_attention = getattr(self, "_has_attention", self.num_attention_heads != 0)
        if not self._has_attention:
            # Megatron requires a multiple of the tensor-parallel size.
            self.num_attention_heads = self.num_query_groups = self.tensor_model_parallel_size
        # Only old versions of torch need to wait for the whole GPU after each exchange of stages.
        self.batch_p2p_sync = False
        super().__post_init__()

    @property
    def stage_shape(self) -> tuple[int, int] | None:
        """Sequence length and width of what a pipeline stage sends for each sample.

        None, for models of tokens: the data's sequence length and the config's `hidden_size`.
        """
        return None

    def configure_model(self) -> ModelT:
        """Reads the checkpoint's settings, if any; builds the model; loads its weights.

        If the checkpoint is damaged or does not fit the model, raises a `UserError`.
        """
        if self.model_cls is None:
            raise ValueError(f"{type(self).__name__} needs a model_cls, the class of the model.")
        if self.initial_ckpt_path:
            self.load_settings_from_checkpoint(self.initial_ckpt_path)
        model = self.model_cls(self)
        if self.initial_ckpt_path:
            self.update_model_from_checkpoint(model, self.initial_ckpt_path)
        return model

    def get_loss_reduction_class(self) -> type[MegatronLossType]:
        """Returns the class of the model's loss, `loss_cls`."""
        if self.loss_cls is None:
            name = f"{type(self).__name__}.get_loss_reduction_class"
            raise NotImplementedError(f"{name}: set loss_cls, the class of the model's loss.")
        return self.loss_cls

    def validation_metrics(self) -> dict[str, Any]:
        """Returns this model's `ValidationMetric` objects by name; none by default."""
        return {}

    def load_settings_from_checkpoint(self, initial_ckpt_path: str | Path) -> None:
        """Sets the fields to a checkpoint's settings, except for `override_parent_fields`.

        A checkpoint without a manifest, as NeMo writes it, causes a warning. A damaged checkpoint,
        or one without a context, causes a `UserError`.
        """
        verify_if_possible(Path(initial_ckpt_path))
        settings = read_model_settings(Path(initial_ckpt_path))
        names = {own.name for own in fields(self)} & settings.keys()
        for name in names - set(self.override_parent_fields):
            # Checkpoints contain no functions, such as `init_method`.
            if not callable(getattr(self, name)):
                setattr(self, name, settings[name])

    def update_model_from_checkpoint(
        self, model: torch.nn.Module, initial_ckpt_path: str | Path
    ) -> list[str]:
        """Calls `load_model_weights`, except for names with a skipped prefix."""
        skip = self.initial_ckpt_skip_keys_with_these_prefixes
        return load_model_weights(model, Path(initial_ckpt_path), skip)
