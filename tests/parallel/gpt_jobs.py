"""What the pool's ranks run: language models with initial weights and one backward pass."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

BLOCK = 12


@dataclass(frozen=True)
class Weight:
    """A rank's shard of a weight; `dimension` is the sharded one, or None."""

    values: np.ndarray
    gradient: np.ndarray | None
    dimension: int | None


@dataclass(frozen=True)
class Found:
    tensor_rank: int
    weights: dict[str, Weight]
    loss: float | None


@dataclass(frozen=True)
class Case:
    """A layout and a model; without `seeded`, the model has Megatron's own layers."""

    tensor: int = 1
    pipeline: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    seeded: bool = True
    tied: bool = True
    positions: str = "learned_absolute"

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline


def make_config(case: Case) -> Any:
    """A config of the model, of which every rank makes the classes anew."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType

    from megakit.models import (
        MegatronBioNeMoTrainableModelConfig,
        SeededGPTModel,
        transformer_block_spec,
    )

    def build(config: Any) -> Any:
        spec = transformer_block_spec(config, AttnMaskType.causal)
        return (SeededGPTModel if case.seeded else GPTModel)(
            config,
            spec if case.seeded else get_gpt_layer_local_spec(),
            vocab_size=32,
            max_sequence_length=BLOCK,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type=case.positions,
        )

    import torch

    config: Any = MegatronBioNeMoTrainableModelConfig(
        **{
            **{"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "seed": 3},
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.3},
            **{"tensor_model_parallel_size": case.tensor},
            **{"pipeline_model_parallel_size": case.pipeline, "pipeline_dtype": torch.float32},
            **case.fields,
        }
    )
    config.model_cls = build
    return config


def build(case: Case, backward: bool = False) -> Found:
    """Builds this rank's part; optionally computes the gradients of one batch."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megakit.testing import distributed_model_parallel_state

    with distributed_model_parallel_state(
        accelerator="cpu",
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
    ):
        # As NeMo does, which seeds each stage differently.
        torch.manual_seed(100 + parallel_state.get_pipeline_model_parallel_rank())
        config = make_config(case)
        model = config.configure_model()
        loss = step(model) if backward else None
        offset = get_transformer_layer_offset(config)
        weights = {}
        for name, weight in model.named_parameters():
            words = name.split(".")
            if "layers" in words:
                number = words.index("layers") + 1
                words[number] = str(int(words[number]) + offset)
            gradient = getattr(weight, "main_grad", weight.grad)
            is_sharded = getattr(weight, "tensor_model_parallel", False)
            weights[".".join(words)] = Weight(
                weight.detach().numpy().copy(),
                None if gradient is None else gradient.detach().numpy().copy(),
                weight.partition_dim if is_sharded else None,
            )
        return Found(parallel_state.get_tensor_model_parallel_rank(), weights, loss)


def step(model: Any) -> float:
    """Computes the losses of one batch and all gradients, as Megatron's schedule does."""
    import torch
    from megatron.core.distributed.finalize_model_grads import (
        _allreduce_non_tensor_model_parallel_grads,
    )
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    tokens = torch.arange(5 * (BLOCK + 1)).view(5, -1).mul(7).remainder(32)
    positions = torch.arange(BLOCK).expand(5, -1)
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
    loss.backward()
    for weight in model.parameters():
        weight.main_grad = weight.grad
    model.ddp_config = type("Config", (), {"use_megatron_fsdp": False})()
    _allreduce_non_tensor_model_parallel_grads(
        [model], model.config, get_tensor_model_parallel_group()
    )
    return float(loss)


def refusal_of_one_stage() -> str:
    """The error on this rank of a pipeline whose last stage alone has an unseeded layer."""
    from megatron.core import parallel_state
    from torch import nn

    from megakit.errors import UserError
    from megakit.models.initial_weights import build_independent_of_layout
    from megakit.testing import distributed_model_parallel_state

    def build() -> nn.Module:
        is_last = parallel_state.is_pipeline_last_stage()
        return nn.Sequential(nn.Linear(2, 2)) if is_last else nn.Sequential(nn.LayerNorm(2))

    with distributed_model_parallel_state(accelerator="cpu", pipeline_model_parallel_size=2):
        try:
            build_independent_of_layout(build)
        except UserError as error:
            return str(error)
        return ""
