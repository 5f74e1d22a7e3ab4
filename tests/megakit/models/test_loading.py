"""Loading a checkpoint's weights: all of them, or all but named ones, and never silently."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")

HEAD = ["head.bias", "head.weight"]
#: In a job, and without communication, as `load_for_inference` reads.
ways = pytest.mark.parametrize("alone", [False, True])


def net(**settings: Any) -> Any:
    from tests.megakit.models.networks import Net, NetConfig

    return Net(NetConfig(**settings))


def load(model: Any, checkpoint: Path, **options: Any) -> list[str]:
    from megakit.models import load_model_weights

    return load_model_weights(model, checkpoint, **options)


@pytest.fixture(scope="module")
def checkpoint(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.megakit.models.networks import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), net(seed=1))


def weights(model: Any) -> dict[str, torch.Tensor]:
    from tests.megakit.models import networks

    return networks.weights(model)


@ways
def test_skipped_weights_stay_and_are_named(checkpoint: Path, alone: bool) -> None:
    fresh = net(seed=2, num_classes=7)
    before = weights(fresh)
    assert load(fresh, checkpoint, skip={"head"}, alone=alone) == HEAD
    expected = weights(net(seed=1)) | {name: before[name] for name in HEAD}
    torch.testing.assert_close(weights(fresh), expected, rtol=0, atol=0)


@ways
def test_every_difference_is_listed_and_nothing_is_loaded(checkpoint: Path, alone: bool) -> None:
    other = net(hidden_size=16)
    other.tail, other.head = other.head, None
    before = weights(other)
    with pytest.raises(UserError) as error:
        load(other, checkpoint, alone=alone)
    first, *lines, last = str(error.value).splitlines()
    assert first == f"{checkpoint}: its weights do not fit Net:"
    assert lines == [
        "  first.bias: shape (16,) in the model, (8,) in the checkpoint",
        "  first.weight: shape (16, 6) in the model, (8, 6) in the checkpoint",
        "  head.bias: not in the model",
        "  head.weight: not in the model",
        "  second.weight: shape (2, 16) in the model, (2, 8) in the checkpoint",
        "  tail.bias: not in the checkpoint",
        "  tail.weight: not in the checkpoint",
    ]
    assert "initial_ckpt_skip_keys_with_these_prefixes" in last
    torch.testing.assert_close(weights(other), before, rtol=0, atol=0)


@ways
def test_state_besides_the_weights_may_be_infinite(
    checkpoint: Path, tmp_path: Path, alone: bool
) -> None:
    """As a best value is before the first validation, in a run that was stopped."""
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (common,) = copy.rglob("common.pt")
    state = torch.load(common, weights_only=False)
    torch.save(state | {"callbacks": {"best": torch.tensor(float("inf"))}}, common)
    assert load(net(seed=2), copy, alone=alone) == []


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    from megakit.models.partial_loading import check_finite
    from tests.megakit.models.networks import save_checkpoint

    number, spoilt = float("inf"), net(seed=1)
    with torch.no_grad():
        spoilt.head.weight[0, 0] = number
    folder = save_checkpoint(tmp_path, spoilt)
    with pytest.raises(UserError, match=f"^{folder}/weights: .*NaN or infinite"):
        load(net(seed=2), folder)
    load(net(seed=2), folder, skip={"head"})
    with pytest.raises(ValueError, match="NaN or infinite"):  # in the state of an optimizer
        check_finite({"step": torch.tensor(3), "more": [torch.tensor([1.0, number])]})
    check_finite(torch.full((3,), 3e38))  # only their sum is infinite
    bucket = {"padding": True, "exp_avg": torch.tensor([number])}  # of a distributed optimizer
    check_finite([bucket])
    with pytest.raises(ValueError, match="NaN or infinite"):
        check_finite([{**bucket, "padding": False}])
