"""Builds Megatron's optimizer and NeMo's learning-rate schedule, as the scripts use them."""

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from nemo.lightning.megatron_parallel import MegatronParallel
from nemo.lightning.pytorch.optim import (
    CosineAnnealingScheduler,
    LRSchedulerModule,
    MegatronOptimizerModule,
)

from megakit.runtime.patching import require_attribute

#: torch's private functions that `FusedAdamW` needs.
_add_to_each = require_attribute(torch, "_foreach_add_")
_fused_adamw = require_attribute(torch, "_fused_adamw_")


class LeanOptimizerModule(MegatronOptimizerModule):
    """Wraps Megatron's optimizer like NeMo's module, with less overhead for each step."""

    def on_train_batch_start(self, *args: Any) -> None:
        """Does not log the learning rate, which takes a tenth of the step; `Reporter` logs it."""

    def optimizers(self, model: MegatronParallel) -> list[torch.optim.Optimizer]:
        """Returns Megatron's optimizer, with a fused kernel if it is built on torch's AdamW.

        Megatron has an option for Transformer Engine's fused Adam, but no option for torch's.
        """
        optimizers: list[torch.optim.Optimizer] = super().optimizers(model)
        for optimizer in optimizers:
            chained = require_attribute(
                require_attribute(optimizer, "mcore_optimizer"), "chained_optimizers"
            )
            for part in chained:
                if type(part.optimizer) is torch.optim.AdamW:
                    # Changes the class in place, because Megatron keeps a reference to the object.
                    part.optimizer.__class__ = FusedAdamW
                    for group in part.optimizer.param_groups:
                        group["fused"] = True
        return optimizers


class FusedAdamW(torch.optim.AdamW):
    """Runs torch's fused AdamW kernel with little overhead.

    torch's own step sorts the weights by type and device, and checks hooks and options, which takes
    longer than the kernel on a small model. The step of this class does not call hooks.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Makes one optimizer step; Megatron passes no closure."""
        if closure is not None or not all(map(self._is_plain, self.param_groups)):
            return super().step(closure)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:  # the rank's optimizer shard has no weights of this group
                continue
            states = [self.state[weight] for weight in weights]
            beta1, beta2 = group["betas"]
            steps = [state["step"] for state in states]
            _add_to_each(steps, 1)
            _fused_adamw(
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

    # Without this mark, torch wraps `step` in order to call hooks whenever it loads a state.
    step.__dict__["hooked"] = True

    def _is_plain(self, group: dict[str, Any]) -> bool:
        # torch's own step has to make the first step, which creates the states.
        special = group["amsgrad"] or group["maximize"] or not group["fused"]
        return not special and all(
            weight in self.state for weight in group["params"] if weight.grad is not None
        )


def megatron_adam(
    lr: float,
    lr_scheduler: LRSchedulerModule | None = None,
    *,
    beta1: float = 0.9,
    beta2: float = 0.98,
    weight_decay: float = 0.01,
    clip_grad: float = 1.0,
    use_distributed_optimizer: bool = False,
) -> MegatronOptimizerModule:
    """Returns Adam with decoupled weight decay and gradient clipping.

    The strategy sets the precision.

    Args:
        lr: Peak learning rate.
        lr_scheduler: Changes the learning rate from step to step. By default, the learning rate is
            constant.
        beta1: Decay rate of Adam's average of gradients, the momentum.
        beta2: Decay rate of Adam's average of squared gradients. The default gives better results
            than the usual 0.999 in runs of some thousand steps at a high learning rate.
        weight_decay: The weight decay.
        clip_grad: The largest norm of the gradient.
        use_distributed_optimizer: Whether to shard the optimizer's state over the data-parallel
            ranks. The strategy's option of this name sets it, too.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        adam_beta1=beta1,
        adam_beta2=beta2,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        use_distributed_optimizer=use_distributed_optimizer,
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
