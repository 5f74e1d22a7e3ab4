"""Makes pipeline stages tell each other the shapes of their tensors once, not at every step.

With `variable_seq_lengths`, Megatron's stages send the shape before each tensor, and the host waits
for the GPU in order to read it. Without it, Megatron computes the shape of tokens. Here, the first
exchange of each kind sends shapes, and the later ones remember them.
"""

import functools
from typing import Any

from megakit.runtime.patching import existing, replace

#: What a config remembers, and the mark of a config whose stages always send the same shapes.
_SHAPES, CONSTANT = "_stage_shapes", "_has_constant_stage_shapes"


@functools.cache
def exchange_shapes_once() -> None:
    """Replaces Megatron's exchange of shapes, for configs with the attribute `CONSTANT`."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    original = existing(P2PCommunicator, "_communicate_shapes")

    def communicate_shapes(
        self: Any, to_next: Any, to_prev: Any, from_prev: bool, from_next: bool
    ) -> Any:
        is_interleaved = self.config.virtual_pipeline_model_parallel_size is not None
        if is_interleaved or not getattr(self.config, CONSTANT, False):
            return original(self, to_next, to_prev, from_prev, from_next)
        # The neighbour's matching exchange is also its first of this kind, so both send shapes.
        kind = to_next is not None, to_prev is not None, from_prev, from_next
        sent = [None if tensor is None else tuple(tensor.shape) for tensor in (to_next, to_prev)]
        known = vars(self.config).setdefault(_SHAPES, {})
        if kind not in known:
            known[kind] = sent, original(self, to_next, to_prev, from_prev, from_next)
        before, received = known[kind]
        if sent != before:
            raise ValueError(
                f"a pipeline stage sends tensors of shapes {sent}, and sent {before} before. Set "
                "variable_seq_lengths=True in the model's config if the shapes differ."
            )
        return received

    replace(P2PCommunicator, "_communicate_shapes", communicate_shapes)


def forget_shapes(config: Any) -> None:
    """Lets a config's next model exchange its shapes anew; its batches may have another size."""
    vars(config).pop(_SHAPES, None)
