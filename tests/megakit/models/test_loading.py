"""Loading a checkpoint's weights: all of them, or all but named ones, and never silently."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


def net(**settings: Any) -> Any:
    from tests.megakit.models.networks import Net, NetConfig

    return Net(NetConfig(**settings))


@pytest.fixture(scope="module")
def checkpoint(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.megakit.models.networks import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), net(seed=1))


HEAD = ["head.bias", "head.weight"]


def test_round_trip_into_a_fresh_model_is_exact(checkpoint: Path) -> None:
    from megakit.models import load_model_weights
    from tests.megakit.models.networks import weights

    saved, fresh = net(seed=1), net(seed=2)
    assert not any(torch.equal(weights(fresh)[name], w) for name, w in weights(saved).items())
    assert load_model_weights(fresh, checkpoint) == []
    assert weights(fresh).keys() == weights(saved).keys()
    for name, weight in weights(saved).items():
        assert torch.equal(weights(fresh)[name], weight), name
    x = torch.randn(5, 6)
    assert torch.equal(fresh(x), saved(x))


def test_skipped_weights_stay_and_are_named(checkpoint: Path) -> None:
    from megakit.models import load_model_weights
    from tests.megakit.models.networks import weights

    saved, fresh = weights(net(seed=1)), net(seed=2, num_classes=7)
    before = weights(fresh)
    assert load_model_weights(fresh, checkpoint, skip={"head"}) == HEAD
    for name, weight in weights(fresh).items():
        assert torch.equal(weight, before[name] if name in HEAD else saved[name]), name


def test_a_new_head_and_an_old_one_are_both_named(checkpoint: Path) -> None:
    from megakit.models import load_model_weights

    fresh = net(seed=2)
    fresh.regressor, fresh.head = fresh.head, None
    skipped = load_model_weights(fresh, checkpoint, skip={"regressor"})
    assert skipped == [*HEAD, "regressor.bias", "regressor.weight"]


def test_every_difference_is_listed(checkpoint: Path) -> None:
    from megakit.models import load_model_weights

    other = net(hidden_size=16)
    other.tail, other.head = other.head, None
    with pytest.raises(UserError) as error:
        load_model_weights(other, checkpoint)
    message = str(error.value)
    assert message.startswith(f"{checkpoint}: its weights do not fit Net:")
    for line in (
        "first.bias: shape (16,) in the model, (8,) in the checkpoint",
        "first.weight: shape (16, 6) in the model, (8, 6) in the checkpoint",
        "second.weight: shape (2, 16) in the model, (2, 8) in the checkpoint",
        "tail.bias: not in the checkpoint",
        "tail.weight: not in the checkpoint",
        "head.bias: not in the model",
        "head.weight: not in the model",
    ):
        assert line in message
    assert "second.bias" not in message


def test_nothing_is_loaded_where_something_does_not_fit(checkpoint: Path) -> None:
    from megakit.models import load_model_weights
    from tests.megakit.models.networks import weights

    other = net(seed=2, num_classes=7)
    before = weights(other)
    with pytest.raises(UserError, match=r"head\.weight"):
        load_model_weights(other, checkpoint, skip={"second"})
    assert all(torch.equal(weight, before[name]) for name, weight in weights(other).items())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, number: float) -> None:
    from megakit.models import load_model_weights
    from tests.megakit.models.networks import save_checkpoint

    spoilt = net(seed=1)
    with torch.no_grad():
        spoilt.head.weight[0, 0] = number
    folder = save_checkpoint(tmp_path, spoilt)
    with pytest.raises(UserError, match=f"^{folder}/weights: .*NaN or infinite"):
        load_model_weights(net(seed=2), folder)
    load_model_weights(net(seed=2), folder, skip={"head"})
