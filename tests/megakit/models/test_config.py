"""A config builds its model late, with settings and weights of a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


def config(**settings: Any) -> Any:
    from tests.megakit.models.networks import NetConfig

    return NetConfig(**settings)


@pytest.fixture(scope="module")
def checkpoint(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with other sizes than the defaults, in another precision and layout."""
    from tests.megakit.models.networks import save_checkpoint

    model = config(hidden_size=24, hidden_dropout=0.25, seed=5).configure_model()
    model.config.num_classes = 9  # in the context only
    model.config.bf16 = True
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), model)


def test_settings_come_from_the_checkpoint_but_for_those_kept(checkpoint: Path) -> None:
    mine = config(seed=1)
    mine.load_settings_from_checkpoint(checkpoint)
    assert (mine.hidden_size, mine.hidden_dropout) == (24, 0.25)
    assert mine.num_classes == 3  # in NetConfig's override_parent_fields
    assert mine.seed == 1
    assert not mine.bf16  # of this run, so in everybody's


def test_a_model_without_attention_satisfies_megatron_s_checks() -> None:
    mine = config(num_attention_heads=0)
    for tensor_parallel in (2, 4):
        mine.tensor_model_parallel_size = tensor_parallel
        mine.__post_init__()  # as the strategy does
        assert mine.num_attention_heads == mine.num_query_groups == tensor_parallel
    with_attention = config(num_attention_heads=3)
    with_attention.tensor_model_parallel_size = 2
    with pytest.raises(ValueError, match="num_attention_heads"):
        with_attention.__post_init__()


def test_the_loss_is_the_config_s_and_never_the_checkpoint_s(checkpoint: Path) -> None:
    class Loss:
        pass

    mine = config(loss_cls=Loss)
    assert mine.get_loss_reduction_class() is Loss
    assert "loss_cls" in mine.override_parent_fields
    mine.load_settings_from_checkpoint(checkpoint)
    assert mine.loss_cls is Loss


def test_which_settings_are_kept_is_the_configs_choice(checkpoint: Path) -> None:
    mine = config(override_parent_fields=["hidden_size"])
    mine.load_settings_from_checkpoint(checkpoint)
    assert (mine.hidden_size, mine.num_classes, mine.bf16) == (8, 9, True)


def test_a_model_takes_settings_and_weights(checkpoint: Path) -> None:
    from tests.megakit.models.networks import weights

    mine = config(
        seed=1,
        num_classes=7,
        initial_ckpt_path=str(checkpoint),
        initial_ckpt_skip_keys_with_these_prefixes={"head"},
    )
    model = mine.configure_model()
    saved = weights(config(hidden_size=24, seed=5).configure_model())
    for name, weight in weights(model).items():
        if not name.startswith("head"):
            assert torch.equal(weight, saved[name]), name
    assert model.head.out_features == 7


def test_without_a_checkpoint_the_model_is_fresh() -> None:
    model = config().configure_model()
    assert model.first.out_features == 8
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_a_checkpoint_without_context_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"context/io\.json: cannot be read"):
        config(initial_ckpt_path=str(tmp_path)).configure_model()


def test_a_config_without_model_or_loss_says_so() -> None:
    with pytest.raises(ValueError, match="NetConfig needs a model_cls"):
        config(model_cls=None).configure_model()
    with pytest.raises(NotImplementedError, match="get_loss_reduction_class"):
        config().get_loss_reduction_class()
