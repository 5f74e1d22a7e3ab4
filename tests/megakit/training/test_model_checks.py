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


def problem(model: Any, loss: object = None) -> str:
    from megakit.training.model_checks import check_model

    with pytest.raises(UserError) as caught:
        check_model(model.config, model, loss)
    (told,) = caught.value.problems
    return str(told)


def is_accepted(model: Any, loss: object = None) -> bool:
    from megakit.training.model_checks import check_model

    check_model(model.config, model, loss)
    return True


def test_sequence_parallelism_needs_a_divided_sequence() -> None:
    """On tensor-parallel ranks that all have the whole sequence, gradients would be added."""
    from model_components import PretrainConfig

    divided = language_model()
    divided.config.sequence_parallel = True
    assert is_accepted(divided)
    divided.embedding.scatter_to_sequence_parallel = False
    assert "no layer of GptConfig's model divides the sequence" in problem(divided)
    autoencoder: Any = PretrainConfig().configure_model()
    assert is_accepted(autoencoder)
    autoencoder.config.sequence_parallel = True
    assert "no layer of PretrainConfig's model divides" in problem(autoencoder)
    autoencoder.divides_sequence = True
    assert is_accepted(autoencoder)


def test_a_mean_loss_with_gradients_per_token() -> None:
    from examples.gpt.gpt_components import NextTokenLoss
    from model_components import MSELossReduction

    model = language_model()
    assert is_accepted(model, NextTokenLoss())
    assert "MSELossReduction returns means" in problem(model, MSELossReduction())
    model.config.calculate_per_token_loss = False
    assert is_accepted(model, MSELossReduction())
