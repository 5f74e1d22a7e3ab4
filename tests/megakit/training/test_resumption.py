"""What a checkpoint brings into a run that goes on: of the run's own names, lengths and types."""

from typing import Any

import pytest
import torch

from megakit.models.finite import check_finite
from megakit.training.resumption import check_structure

OWN = {"rates": [0.1, 0.2], "betas": (0.9, 0.98), "step": 3, "best": None, "on": True, "name": "a"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rates": [1, 0.2]},  # an integer that Python printed without a point
        {"best": 0.5},  # not known yet in this start
        {"step": 10**6},
        {"name": "b"},
    ],
    ids=repr,
)
def test_what_fits(change: dict[str, Any]) -> None:
    check_structure(OWN | change, OWN, "state")


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([], "state is a list, not a dict"),
        (OWN | {"step": "many"}, "state.step is a str, not a int"),
        (OWN | {"step": 1.5}, "state.step is a float, not a int"),
        (OWN | {"step": True}, "state.step is a bool, not a int"),
        (OWN | {"on": 1}, "state.on is a int, not a bool"),
        (OWN | {"best": "none"}, "state.best is a str, not a NoneType"),
        (OWN | {"betas": [0.9, 0.98]}, "state.betas is a list, not a tuple"),
        (OWN | {"rates": [0.1]}, "state.rates has 1 entries, not 2"),
        (OWN | {"rates": [0.1, None]}, "state.rates.1 is a NoneType, not a float"),
        (OWN | {"step_once": 1}, "state has other entries"),
        ({"rates": [0.1, 0.2]}, "state has other entries"),
    ],
    ids=repr,
)
def test_what_does_not_fit(found: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_structure(found, OWN, "state")


@pytest.mark.parametrize("place", ["state_dict", "optimizer"])
def test_numbers_that_are_none(place: str) -> None:
    state = {"weights": [torch.zeros(3)], "step": torch.tensor(3)}
    check_finite({place: state})
    with pytest.raises(ValueError, match="NaN or infinite"):
        check_finite({place: state | {"more": [torch.tensor([1.0, torch.nan])]}})
