"""Megatron's optimizer and NeMo's schedule, as the scripts use them."""

from typing import Any

from megatron.core.optimizer import OptimizerConfig
from nemo.lightning.pytorch.optim import (
    CosineAnnealingScheduler,
    LRSchedulerModule,
    MegatronOptimizerModule,
)


class QuietOptimizerModule(MegatronOptimizerModule):
    """NeMo's module for Megatron's optimizer, which leaves logging the learning rate to others.

    NeMo's logs it at every step, through Lightning, which takes a tenth of a small model's step.
    """

    def on_train_batch_start(self, *args: Any) -> None:
        """Does not log the learning rate."""


def megatron_adam(
    lr: float,
    lr_scheduler: LRSchedulerModule | None = None,
    *,
    weight_decay: float = 0.01,
    clip_grad: float = 1.0,
    use_distributed_optimizer: bool = False,
) -> MegatronOptimizerModule:
    """Adam with decoupled weight decay and clipping of the gradients' norm.

    Precision is filled in by the strategy.

    Args:
        lr: Peak learning rate.
        lr_scheduler: How it changes from step to step; constant by default.
        weight_decay: Of Adam.
        clip_grad: Largest norm of the gradient.
        use_distributed_optimizer: Whether data-parallel ranks share the optimizer's state among
            them. Saves memory in large models; its resumption is not exact in this Megatron.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    return QuietOptimizerModule(config=config, lr_scheduler=lr_scheduler)


def cosine_annealing(max_steps: int, warmup_share: float = 0.02) -> CosineAnnealingScheduler:
    """A short linear warm-up, then half a cosine down to zero at the last step."""
    return CosineAnnealingScheduler(
        max_steps=max_steps,
        warmup_steps=max(1, round(warmup_share * max_steps)),
        constant_steps=0,
        min_lr=0.0,
    )
