"""Megatron's optimizer and NeMo's schedule, as the scripts use them."""

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from nemo.lightning.pytorch.optim import (
    CosineAnnealingScheduler,
    LRSchedulerModule,
    MegatronOptimizerModule,
)


class LeanOptimizerModule(MegatronOptimizerModule):
    """NeMo's module for Megatron's optimizer, without what costs a small model's step its time."""

    def on_train_batch_start(self, *args: Any) -> None:
        """Does not log the learning rate.

        NeMo's logs it at every step, through Lightning: a tenth of the step. `Reporter` logs it.
        """

    def optimizers(self, model: Any) -> list[Any]:
        """Megatron's optimizer; where it is built on torch's Adam, as one kernel for all weights.

        Megatron has an option for Transformer Engine's fused Adam, and none for torch's.
        """
        optimizers = super().optimizers(model)
        for optimizer in optimizers:
            for part in optimizer.mcore_optimizer.chained_optimizers:
                if type(part.optimizer) is torch.optim.AdamW:
                    # The same object, to which Megatron's own holds on.
                    part.optimizer.__class__ = FusedAdamW
                    for group in part.optimizer.param_groups:
                        group["fused"] = True
        return optimizers


class FusedAdamW(torch.optim.AdamW):
    """torch's, at whose step little but the fused kernel runs.

    torch's own sorts the weights by kind and device at every step, and looks for hooks and options,
    which takes longer than the kernel on a small model. Here its hooks are not called.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; Megatron gives no closure."""
        if closure is not None or not all(map(self._is_plain, self.param_groups)):
            return super().step(closure)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:  # as on a rank whose share of the optimizer has none of the group
                continue
            states = [self.state[weight] for weight in weights]
            beta1, beta2 = group["betas"]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                weights,
                [weight.grad for weight in weights],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
        return None

    # torch wraps a step without this mark, to call hooks, whenever it loads a state.
    step.__dict__["hooked"] = True

    def _is_plain(self, group: dict[str, Any]) -> bool:
        """Whether this is not the first step, and was fused from the first on."""
        special = group["amsgrad"] or group["maximize"] or not group["fused"]
        return not special and all(
            weight in self.state for weight in group["params"] if weight.grad is not None
        )


def megatron_adam(
    lr: float,
    lr_scheduler: LRSchedulerModule | None = None,
    *,
    beta2: float = 0.98,
    weight_decay: float = 0.01,
    clip_grad: float = 1.0,
    use_distributed_optimizer: bool = False,
) -> MegatronOptimizerModule:
    """Adam with decoupled weight decay and clipping of the gradients' norm.

    Precision is filled in by the strategy.

    Args:
        lr: Peak learning rate.
        lr_scheduler: How it changes from step to step; constant by default.
        beta2: How slowly Adam forgets the size of gradients; below its usual 0.999, since runs of
            some thousand steps at a high rate end better so, and differ less by seed.
        weight_decay: Of Adam.
        clip_grad: Largest norm of the gradient.
        use_distributed_optimizer: Whether data-parallel ranks share the optimizer's state among
            them. Saves memory in large models; its resumption is not exact in this Megatron.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        adam_beta2=beta2,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    return LeanOptimizerModule(config=config, lr_scheduler=lr_scheduler)


def cosine_annealing(max_steps: int, warmup_share: float = 0.1) -> CosineAnnealingScheduler:
    """A linear warm-up, then half a cosine down to zero at the last step."""
    return CosineAnnealingScheduler(
        max_steps=max_steps,
        warmup_steps=max(1, round(warmup_share * max_steps)),
        constant_steps=0,
        min_lr=0.0,
    )
