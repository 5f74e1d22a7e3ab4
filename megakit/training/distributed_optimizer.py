"""Makes the resumption of Megatron's distributed optimizer exact if it uses torch's AdamW.

Megatron writes its distributed optimizer for the Adam of Transformer Engine, whose step is a number
of the parameter group. torch's AdamW has one step tensor for each weight.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer

from megakit.errors import UserError
from megakit.runtime.patching import patch, require_attribute


@functools.cache
def make_resumption_exact() -> None:
    """Replaces three methods of Megatron's distributed optimizer, if it uses torch's AdamW."""
    if require_attribute(distrib_optimizer, "HAVE_APEX_OR_TE"):
        return
    patched = distrib_optimizer.DistributedOptimizer
    state_dict = require_attribute(patched, "state_dict")
    load_state_dict = require_attribute(patched, "load_state_dict")
    set_states = require_attribute(patched, "_set_main_param_and_optimizer_states")

    @functools.wraps(state_dict)
    def state_dict_with_states(self: Any) -> Any:
        # A run that resumes or stops before its first step needs a state; the original fails if
        # there is none.
        create_states(self.optimizer)
        if self.optimizer.state:
            return state_dict(self)
        # The original fails if the rank's shard has no weights. Rank 0 has some, and saves.
        groups = self.optimizer.param_groups
        without = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return {"optimizer": {"param_groups": [{"step": 0.0, **group} for group in without]}}

    @functools.wraps(load_state_dict)
    def load_separate_steps(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        # The original gives all weights the same step tensor, so each step would count once for
        # each weight.
        for own in self.optimizer.state.values():
            own["step"] = own["step"].clone()

    @functools.wraps(set_states)
    def set_states_without_step(self: Any, model_param: Any, tensors: Any) -> None:
        # The original requires a step, which the checkpoint has in the parameter group.
        group, place = self.model_param_group_index_map[model_param]
        own = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        set_states(self, model_param, {"step": own["step"], **tensors})

    patch(patched, "state_dict", state_dict_with_states)
    patch(patched, "load_state_dict", load_separate_steps)
    patch(patched, "_set_main_param_and_optimizer_states", set_states_without_step)


def check_saved_format(metadata: Mapping[str, Any] | None, is_distributed: bool) -> None:
    """Checks that a checkpoint was written with the same kind of optimizer as the resumed run's.

    Args:
        metadata: What Megatron wrote about the content of the checkpoint; None if it wrote nothing.
        is_distributed: Whether the resumed run uses the distributed optimizer.

    Raises:
        UserError: One of the optimizers is distributed and the other one is not.
    """
    if metadata is None:
        return
    was_distributed = "distrib_optim_sharding_type" in metadata
    if was_distributed != is_distributed:
        raise UserError(
            f"The checkpoint was written with use_distributed_optimizer={was_distributed}, and "
            "Megatron stores the two kinds of optimizers in different formats. Resume with "
            f'strategy={{"use_distributed_optimizer": {was_distributed}}}, or with the option of '
            "your script that sets it."
        )


def create_states(optimizer: torch.optim.Optimizer) -> None:
    """Creates Adam's states of weights that have none, as Adam's first step would."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state[weight]
            if not state:
                device = weight.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)
