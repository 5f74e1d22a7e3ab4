"""Makes pipeline stages communicate tensor shapes once instead of in every step.

With `variable_seq_lengths`, Megatron's stages send the shape before each tensor, and the host waits
for the GPU in order to read the shape. Without `variable_seq_lengths`, Megatron derives the shape
from sequence length, micro batch size and hidden size, which fits models of tokens only. Here, the
first exchange of each kind sends shapes, and later exchanges reuse them.
"""

import functools
from typing import Any

from megakit.runtime.patching import patch, require_attribute

#: The config attributes that hold the known shapes, and that mark a model of constant shapes.
_SHAPES, CONSTANT = "_stage_shapes", "_has_constant_stage_shapes"


def exchange_shapes_once(config: Any) -> None:
    """Makes the stages of a config's next model exchange shapes once, if these are constant."""
    forget_shapes(config)
    if getattr(config, CONSTANT, False):
        _replace_exchange()
        vars(config)[_SHAPES] = {}


def forget_shapes(config: Any) -> None:
    """Makes the stages of a config's model exchange shapes in every step, as Megatron does."""
    vars(config).pop(_SHAPES, None)


@functools.cache
def _replace_exchange() -> None:
    """Replaces Megatron's exchange of shapes, for configs with the attribute `_SHAPES`."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    original = require_attribute(P2PCommunicator, "_communicate_shapes")

    def communicate_shapes(
        self: Any, to_next: Any, to_prev: Any, from_prev: bool, from_next: bool
    ) -> Any:
        known = getattr(self.config, _SHAPES, None)
        is_interleaved = self.config.virtual_pipeline_model_parallel_size is not None
        if known is None or is_interleaved:
            return original(self, to_next, to_prev, from_prev, from_next)
        # The neighbour's matching exchange is also its first of this kind, so both send shapes.
        kind = to_next is not None, to_prev is not None, from_prev, from_next
        sent = [None if tensor is None else tuple(tensor.shape) for tensor in (to_next, to_prev)]
        if kind not in known:
            known[kind] = sent, original(self, to_next, to_prev, from_prev, from_next)
        before, received = known[kind]
        if sent != before:
            raise ValueError(
                f"a pipeline stage sends tensors of shapes {sent}, and sent {before} before. Set "
                "variable_seq_lengths=True in the model's config if the shapes differ."
            )
        return received

    patch(P2PCommunicator, "_communicate_shapes", communicate_shapes)
