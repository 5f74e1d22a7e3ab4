"""Adam for Megatron without Apex and Transformer Engine, and what Megatron's optimizers lack."""

import functools
import itertools
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megakit.errors import UserError
from megakit.runtime.patching import patch, require_attribute

#: torch's private kernels that `FusedAdam` needs: with and without decoupled weight decay.
_adamw, _adam = require_attribute(torch, "_fused_adamw_"), require_attribute(torch, "_fused_adam_")
#: Megatron's method that saves the state of a distributed optimizer so that any layout loads it.
_RESHARDABLE = "sharded_param_state_fully_reshardable"
_megatrons_state = require_attribute(DistributedOptimizer, _RESHARDABLE)
_init = MegatronOptimizer.__init__


class FusedAdam(torch.optim.Optimizer):
    """Runs torch's fused Adam kernels, with the arguments and the state of Apex's FusedAdam.

    The number of steps is an integer of the parameter group, where Megatron saves and restores it.
    torch's own Adam has a step tensor for each weight, which Megatron restores wrongly, and checks
    hooks and options at each step, which takes longer than the kernel on a small model.

    Attributes:
        counts: Whether `step` counts the step. If a CUDA graph repeats `step`, its owner calls
            `count` before each step, because a graph repeats kernels and no Python.
    """

    counts = True

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any,
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
        capturable: bool = False,  # which megatron-core 0.19 passes
    ) -> None:
        if capturable:
            raise UserError(
                "optimizer_cuda_graph=True: FusedAdam counts its steps in Python, and a CUDA graph "
                "would repeat one number. Leave optimizer_cuda_graph out."
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "adam_w_mode": adam_w_mode, "step": 0})
        # What the kernels read on the weights' device, by the number of the group.
        self._step_and_lr: dict[int, tuple[torch.Tensor, ...]] = {}

    def count(self) -> None:
        """Counts a step, and writes what changes from step to step to the weights' device."""
        for number, group in enumerate(self.param_groups):
            group["step"] += 1
            if not group["params"]:  # the rank's optimizer shard has no weights of this group
                continue
            if number not in self._step_and_lr:
                device = group["params"][0].device
                self._step_and_lr[number] = torch.zeros(2, device=device).unbind()
            step, lr = self._step_and_lr[number]
            step.fill_(group["step"])
            if lr.is_cuda:
                lr.fill_(group["lr"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one optimizer step; Megatron passes no closure."""
        self._create_states()
        if self.counts:
            self.count()
        for number, group in enumerate(self.param_groups):
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            states = [self.state[weight] for weight in weights]
            moments = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")]
            step, lr = self._step_and_lr[number]
            options = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            if lr.is_cuda:
                options["lr"] = lr
            options["beta1"], options["beta2"] = group["betas"]
            update = _adamw if group["adam_w_mode"] else _adam
            tensors = (weights, gradients, *moments, [], [step] * len(weights))
            update(*tensors, amsgrad=False, maximize=False, **options)

    # Without this mark, torch wraps `step` in order to call hooks.
    step.__dict__["hooked"] = True

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; before the first step, the state that the first step begins with."""
        self._create_states()  # Megatron cannot save a distributed optimizer without states
        return super().state_dict()

    def _create_states(self) -> None:
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            if weight not in self.state:
                moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                self.state[weight] = moments


@functools.cache
def patch_optimizers() -> None:
    """Makes Megatron build `FusedAdam` if Apex is not installed.

    Also corrects how Megatron loads the state of SGD, and how it saves and loads the state of a
    distributed optimizer.
    """
    patch(
        MegatronOptimizer,
        "__init__",
        _init_with_state,
        group="safe",
        reason="for SGD, Megatron passes no function that creates the state, and resuming calls it",
        when="with SGD",
    )
    patch(
        DistributedOptimizer,
        _RESHARDABLE,
        _reshardable_state,
        group="safe",
        reason="with several buckets, it saves the states of wrong weights: it joins the buckets "
        "without their padding, but looks up the weights at their places with padding",
        when="with the distributed optimizer",
    )
    load = "load_parameter_state_from_dp_reshardable"
    patch(
        DistributedOptimizer,
        load,
        torch.no_grad()(getattr(DistributedOptimizer, load)),
        group="safe",
        reason="in float32, it fails, because it writes into weights that need gradients",
        when="with the distributed optimizer",
    )
    if not require_attribute(megatron_optimizer, "USING_PYTORCH_OPTIMIZER"):
        return
    for owner, name, value in (
        (megatron_optimizer, "Adam", FusedAdam),
        (megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "Adam", FusedAdam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
    ):
        patch(
            owner,
            name,
            value,
            group="safe",
            reason="Megatron restores the steps of torch's AdamW wrongly; it is written for Apex's",
            worth="13% of a step: torch's fused kernel",
            when="without Apex and Transformer Engine",
        )


def _init_with_state(self: Any, optimizer: Any, config: Any, init_state_fn: Any = None) -> None:
    """Adds what Megatron lacks for SGD: a function that creates the state, before a load."""
    if isinstance(self, DistributedOptimizer) and isinstance(optimizer, megatron_optimizer.SGD):
        raise UserError(
            "use_distributed_optimizer=True: Megatron's distributed optimizer can save only Adam, "
            "not SGD. Leave use_distributed_optimizer out, or use Adam."
        )
    _init(self, optimizer, config, init_state_fn or _create_momenta)


def _create_momenta(optimizer: Any, config: OptimizerConfig) -> None:
    """Creates SGD's state before its first step; without momentum, there is none."""
    for group in optimizer.param_groups:
        for weight in group["params"] if group.get("momentum") else ():
            optimizer.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))


def _reshardable_state(
    optimizer: Any, weights: Any, is_loading: bool = False, metadata: Any = None
) -> Any:
    """Calls Megatron's method with the places of the weights in buffers without padding."""
    padded = [buffer.param_index_map for buffer in optimizer.buffers]
    try:
        for buffer in optimizer.buffers:
            paddings = (one.grad_data.numel() - one.numel_unpadded for one in buffer.buckets)
            padding_before = [0, *itertools.accumulate(paddings)]
            buffer.param_index_map = {
                weight: (start - padding_before[bucket], end - padding_before[bucket], bucket)
                for weight, (start, end, bucket) in buffer.param_index_map.items()
            }
        return _megatrons_state(optimizer, weights, is_loading, metadata)
    finally:
        for buffer, places in zip(optimizer.buffers, padded, strict=True):
            buffer.param_index_map = places
