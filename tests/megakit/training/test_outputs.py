"""Outputs of a model that are no numbers are refused before anything is written."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megakit.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron")


def outputs(**changed: Any) -> Any:
    from megakit.training.prediction import Outputs

    numbers = np.arange(2)
    ones = {"output": np.ones((2, 10), np.float32), "latent": np.ones((2, 3), np.float32)}
    fields: dict[str, Any] = {"idx": numbers, "label": numbers, **ones}
    return Outputs(**fields | changed)


@pytest.mark.parametrize(("name", "number"), [("output", np.nan), ("latent", np.inf)])
def test_no_numbers(name: str, number: float) -> None:
    spoilt = np.array([[1.0, 2.0, 3.0], [4.0, number, 6.0]], np.float32)
    with pytest.raises(UserError, match=r"^step=000010: the model's outputs are NaN or infinite"):
        outputs(**{name: spoilt}).check_finite("step=000010")


def test_a_script_that_writes_scores_needs_labels() -> None:
    from megakit.reporting.results import Results
    from megakit.training.stages import _classify

    run: Any = SimpleNamespace(start=None)
    blocks: Any = [outputs(label=None)]
    with pytest.raises(UserError, match=r"no 'label'.* call megakit\.training\.predict instead"):
        list(_classify(run, blocks, Results(2)))


def of_a_step(**changed: Any) -> Any:
    """What a `predict_step` returns for four samples of five tokens; the last one is padding."""
    mask = torch.ones(4, 5)
    mask[1, 2:] = mask[3] = 0
    logits = torch.arange(60.0).view(4, 5, 3)
    entries = {"output": logits, "idx": torch.tensor([7, 8, 9, 0]), "loss_mask": mask} | changed
    return {name: value for name, value in entries.items() if value is not None}


def test_rows_of_tokens() -> None:
    """A mask of tokens tells which samples are real; a label and latent points are optional."""
    from megakit.training.prediction import Outputs, _as_rows

    rows = Outputs.from_rows(_as_rows(of_a_step()))
    assert np.array_equal(rows.output, np.arange(45).reshape(3, 5, 3))
    assert rows.idx.tolist() == [7, 8, 9]
    assert (rows.label, rows.latent) == (None, None)
    rows.check_finite(None)
    labelled = Outputs.from_rows(_as_rows(of_a_step(label=torch.arange(4), latent=None)))
    assert labelled.label is not None
    assert labelled.label.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (torch.bfloat16, np.float32),
        (torch.int64, np.int64),
    ],
)
def test_types_of_outputs(found: torch.dtype, kept: type) -> None:
    from megakit.training.prediction import _as_rows

    rows = _as_rows(of_a_step(output=torch.ones(4, dtype=found)))
    assert rows["output"].dtype == kept
    assert rows["output"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (of_a_step(idx=None), "output, loss_mask without a tensor for idx. Return"),
        (of_a_step(output=torch.ones(5, 4, 3)), r"'output' of shape \(5, 4, 3\) for the 4 samples"),
    ],
)
def test_what_a_step_has_to_return(returned: Any, problem: str) -> None:
    from megakit.training.prediction import _as_rows

    with pytest.raises(UserError, match=rf"predict_step returned .*{problem}.* `idx` \(B,\)"):
        _as_rows(returned)
