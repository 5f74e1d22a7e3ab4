"""Numbers in a checkpoint that are none are refused before a run goes on with them."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("place", ["state_dict", "optimizer"])
def test_numbers_that_are_none(place: str) -> None:
    from megakit.models.loading import check_finite

    state = {"weights": [torch.zeros(3)], "step": torch.tensor(3)}
    check_finite({place: state})
    with pytest.raises(ValueError, match="NaN or infinite"):
        check_finite({place: state | {"more": [torch.tensor([1.0, torch.nan])]}})
