"""The random numbers of dropout depend on the step; in trainings: tests/parallel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def drawn() -> Any:
    """Numbers that a rank draws after its generators were seeded for a step."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megakit.training.dropout import seed_generators

    def draw(seed: int, step: int, stage: int = 0, data_rank: int = 0) -> list[float]:
        ranks = {"pipeline_model_parallel": stage, "data_parallel": data_rank}
        with pytest.MonkeyPatch.context() as patch:
            for kind, rank in ranks.items():
                patch.setattr(parallel_state, f"get_{kind}_rank", lambda rank=rank: rank)
            seed_generators(seed, step)
            numbers = torch.rand(2).tolist()
            with get_cuda_rng_tracker().fork():
                return [*numbers, *torch.rand(2).tolist()]

    return draw


def test_each_step_and_place_has_its_own_numbers(drawn: Any) -> None:
    arguments = [(1, 0), (1, 1), (2, 0), (1, 0, 1), (1, 0, 0, 1), (1, 0, 1, 1)]
    numbers = [number for chosen in arguments for number in drawn(*chosen)]
    assert len(set(numbers)) == len(numbers) == 24
    assert numbers == [number for chosen in arguments for number in drawn(*chosen)]


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.MultiheadAttention(8, 2, dropout=0.1), True),
        (nn.LSTM(4, 4, 2, dropout=0.1), True),
        (nn.Linear(2, 2), False),
    ],
)
def test_dropout_is_found_and_only_then_generators_are_seeded(
    module: nn.Module, draws: bool
) -> None:
    from megakit.training.dropout import ExactDropout

    callback, model = ExactDropout(), nn.Sequential(module)
    trainer: Any = SimpleNamespace(global_step=3)
    callback.on_train_start(trainer, model)  # type: ignore[arg-type]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    callback.on_train_batch_start(trainer, model, None, 0)
    assert torch.equal(torch.get_rng_state(), before) != draws


@pytest.mark.parametrize("kind", ["hidden_dropout", "attention_dropout"])
def test_dropout_of_megatron_s_layers_is_found(kind: str) -> None:
    from examples.gpt.gpt_components import GptConfig
    from megakit.training.dropout import has_dropout

    sizes: Any = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "block_size": 16}
    assert not has_dropout(GptConfig(**sizes).configure_model())
    sizes[kind] = 0.1
    assert has_dropout(GptConfig(**sizes).configure_model())
