"""Seeds the initial weights of a layer by the layer's name; imports neither NeMo nor Megatron."""

import contextlib
import hashlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seeds torch's CPU generator from (seed, name) inside the block; restores it at the end.

    NeMo seeds each pipeline stage differently, so a layer's initial weights would depend on the
    layout. With this seed the weights are equal under every layout, on CPUs and GPUs. This requires
    that Megatron initializes weights on the CPU (`use_cpu_initialization`).
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` would also seed the GPUs' generators, which nothing restores.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
