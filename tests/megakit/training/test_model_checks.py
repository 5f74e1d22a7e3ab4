"""Models that would train wrongly without an error."""

from typing import Any

import pytest

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


def language_model(**fields: Any) -> Any:
    from examples.gpt.gpt_components import GptConfig

    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "block_size": 16,
    }
    return GptConfig(**sizes, **fields).configure_model()


def problem(model: Any, loss: object = None) -> str | None:
    from megakit.training.checks import refuse_wrong_gradients

    try:
        refuse_wrong_gradients(model.config, model, loss)
    except UserError as error:
        return str(error)
    return None


def test_sequence_parallelism_needs_a_divided_sequence() -> None:
    """On tensor-parallel ranks that all have the whole sequence, gradients would be added."""
    from model_components import PretrainConfig

    divided = language_model()
    divided.config.sequence_parallel = True
    assert problem(divided) is None
    divided.embedding.scatter_to_sequence_parallel = False
    assert "no layer of the model divides the sequence" in (problem(divided) or "")
    autoencoder: Any = PretrainConfig().configure_model()
    assert problem(autoencoder) is None
    autoencoder.config.sequence_parallel = True
    assert "no layer of the model divides" in (problem(autoencoder) or "")
    autoencoder.divides_sequence = True
    assert problem(autoencoder) is None


def test_a_mean_loss_with_gradients_per_token() -> None:
    from examples.gpt.gpt_components import NextTokenLoss
    from model_components import MSELossReduction

    model = language_model()
    assert problem(model, NextTokenLoss()) is None
    assert "MSELossReduction returns means" in (problem(model, MSELossReduction()) or "")
    model.config.calculate_per_token_loss = False
    assert problem(model, MSELossReduction()) is None
