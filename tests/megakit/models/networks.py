"""A small model, its config, and checkpoints of it. Imported once Megatron is set up."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer import MegatronModule
from nemo.lightning import io

from megakit.models import (
    OVERRIDE_BIONEMO_CONFIG_DEFAULTS,
    IOMixinWithGettersSetters,
    MegatronBioNeMoTrainableModelConfig,
    column_parallel_linear,
    row_parallel_linear,
    seeded,
)
from megakit.nemo.writer import write_context


class Net(MegatronModule):
    """Two parallel layers, 6-hidden-2, and a head that every rank has, 2-classes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first = column_parallel_linear(config, 6, config.hidden_size, "first")
        self.second = row_parallel_linear(config, config.hidden_size, 2, "second")
        with seeded(config.seed, "head"):
            self.head = torch.nn.Linear(2, config.num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.first(x)
        z, _ = self.second(hidden.relu())
        logits: torch.Tensor = self.head(z)
        return logits


@dataclass
class NetConfig(MegatronBioNeMoTrainableModelConfig[Net, Any], IOMixinWithGettersSetters):
    model_cls: type[Net] | None = Net
    num_layers: int = 1
    num_attention_heads: int = 1
    hidden_size: int = 8
    num_classes: int = 3
    override_parent_fields: list[str] = field(
        default_factory=lambda: [*OVERRIDE_BIONEMO_CONFIG_DEFAULTS, "num_classes"]
    )


class Module(io.IOMixin):
    """As much of a Lightning module as a checkpoint's context needs."""

    def __init__(self, config: Any) -> None:
        self.config = config


def save_checkpoint(folder: Path, model: Net) -> Path:
    """Writes weights and context as NeMo's strategy and our writer do."""
    (folder / "weights").mkdir(parents=True)
    dist_checkpointing.save(model.sharded_state_dict(prefix="module."), str(folder / "weights"))
    write_context(folder / "context", Module(model.config))
    return folder


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}
