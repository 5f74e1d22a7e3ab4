"""Builds Megatron's optimizer and NeMo's learning-rate schedule, as the scripts use them."""

import lightning.pytorch as pl
from megatron.core.optimizer import OptimizerConfig
from nemo.lightning.pytorch.optim import (
    CosineAnnealingScheduler,
    LRSchedulerModule,
    MegatronOptimizerModule,
)


class LeanOptimizerModule(MegatronOptimizerModule):
    """Builds Megatron's optimizer like NeMo's module, with `FusedAdam`."""

    # NeMo's method logs the learning rate, which takes a tenth of the step; `Reporter` logs it.
    on_train_batch_start = pl.Callback.on_train_batch_start


def megatron_adam(
    lr: float,
    lr_scheduler: LRSchedulerModule | None = None,
    *,
    beta1: float = 0.9,
    beta2: float = 0.98,
    weight_decay: float = 0.01,
    clip_grad: float = 1.0,
) -> MegatronOptimizerModule:
    """Returns Adam with decoupled weight decay and gradient clipping.

    The strategy sets the precision, and whether ranks shard the optimizer's state.

    Args:
        lr: Peak learning rate.
        lr_scheduler: Changes the learning rate from step to step; by default, it is constant.
        beta1: Decay rate of Adam's average of gradients, the momentum.
        beta2: Decay rate of Adam's average of squared gradients. The default gives better results
            than the usual 0.999 in runs of some thousand steps at a high learning rate.
        weight_decay: The weight decay.
        clip_grad: The largest norm of the gradient.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        adam_beta1=beta1,
        adam_beta2=beta2,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
    )
    return LeanOptimizerModule(config=config, lr_scheduler=lr_scheduler)


def cosine_annealing(max_steps: int, warmup_share: float = 0.1) -> CosineAnnealingScheduler:
    """Returns a schedule: a linear warm-up, then half a cosine down to zero at the last step."""
    return CosineAnnealingScheduler(
        max_steps=max_steps,
        warmup_steps=max(1, round(warmup_share * max_steps)),
        constant_steps=0,
        min_lr=0.0,
    )
