"""Layers of one's own that pass Megatron's sums a tensor that is not contiguous in memory."""

import numpy as np
import pytest

from megakit.testing import distributed_model_parallel_state


def compute(kind: str, module: str, size: int) -> list[np.ndarray]:
    """Runs in each rank: the outputs of two parallel layers, and the gradient of their input."""
    with distributed_model_parallel_state(tensor_model_parallel_size=size):
        import torch
        from megatron.core import parallel_state, tensor_parallel

        functions = vars(getattr(tensor_parallel, module))
        copy_to = functions["copy_to_tensor_model_parallel_region"]
        reduce_from = functions["reduce_from_tensor_model_parallel_region"]
        rank = parallel_state.get_tensor_model_parallel_rank()
        torch.manual_seed(1)
        x, first, second = torch.randn(4, 6), torch.randn(8, 6), torch.randn(5, 8)
        x.requires_grad_()
        if kind == "transposed":
            hidden = (first.chunk(size)[rank] @ copy_to(x).T.contiguous()).T
            y = reduce_from((second.chunk(size, 1)[rank] @ hidden.T).T)
            y.square().sum().backward()
        else:
            y = reduce_from(second.chunk(size, 1)[rank].sum().expand(4, 6))
            (copy_to(x).sum() / size).backward()
        assert x.grad is not None
        return [y.detach().numpy(), x.grad.numpy()]


@pytest.mark.parametrize("module", ["mappings", "layers"])  # megakit patches both
@pytest.mark.parametrize("kind", ["transposed", "expanded"])
def test_two_ranks_compute_as_one(ranks, kind, module):
    (expected,) = ranks.run(compute, kind, module, 1, world_size=1)
    for found in ranks.run(compute, kind, module, 2, world_size=2):
        for ours, whole in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, whole, rtol=1e-4, atol=1e-5)
