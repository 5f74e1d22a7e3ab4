"""Importing weights: a state dict becomes a checkpoint, exactly or not at all."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.errors import UserError

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:Apex is not installed", "ignore:.*no manifest"),
]


@pytest.fixture(scope="module")
def state(megatron: None) -> dict[str, torch.Tensor]:
    """Of a model whose weights are not those that an import starts from."""
    from tests.megakit.models.networks import Net, NetConfig

    found = Net(NetConfig(seed=3, hidden_size=12)).state_dict()
    return {name: value.clone() for name, value in found.items() if value is not None}


def convert(weights: Any, output: Path) -> Path:
    from megakit.models import checkpoint_from_weights
    from tests.megakit.models.networks import NetConfig

    return checkpoint_from_weights(weights, NetConfig(hidden_size=12), output)


def test_weights_come_back_bit_by_bit(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    from megakit.checkpoints import read_model_settings, verify
    from megakit.models import load_for_inference

    (tmp_path / ".partial-step=000070").mkdir()  # of a killed import
    (tmp_path / ".partial-step=000070" / "rest").write_text("old")
    short = {name: value.bfloat16() for name, value in state.items()}
    made = convert(short, tmp_path / "step=000070")
    found = load_for_inference(made).state_dict()
    expected = {name: value.float() for name, value in short.items()}
    torch.testing.assert_close(dict(found), expected, rtol=0, atol=0)
    manifest = verify(made)
    assert (manifest.stage, manifest.model, manifest.step) == ("imported", "Net", 70)
    assert read_model_settings(made)["hidden_size"] == 12
    assert sorted(tmp_path.iterdir()) == [made]
    with pytest.raises(UserError, match="Name a new folder"):
        convert(state, made)


def test_one_error_lists_all_problems(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    wrong = state | {"first.bias": torch.ones(9)}
    wrong["fc.weight"] = wrong.pop("head.weight")
    with pytest.raises(UserError) as error:
        convert(wrong, tmp_path / "imported")
    for part in (
        'Missing key(s) in state_dict: "head.weight".',
        'Unexpected key(s) in state_dict: "fc.weight".',
        "size mismatch for first.bias: copying a param with shape torch.Size([9])",
        "Rename the entries of the state dict.",
    ):
        assert part in str(error.value)
    with pytest.raises(UserError, match="NaN or infinite"):
        convert(state | {"head.bias": torch.tensor([0, 1, torch.nan])}, tmp_path / "imported")
    assert not [*tmp_path.iterdir()]
