"""Predictions of a model over tokens: without labels, with a mask of tokens, in any layout."""

from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.parallel import token_jobs


@pytest.fixture(scope="session")
def logits(ranks: Any) -> NDArray[np.float32]:
    cloudpickle.register_pickle_by_value(token_jobs)  # ranks cannot import it
    ((_, logits),) = ranks.run(token_jobs.exact, world_size=1)
    assert logits.shape == (33, 16, 32)
    return logits


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        *(("one process", False), ("pp2", False)),
        pytest.param("tp2", True, marks=pytest.mark.long),
        pytest.param("pp2-dp2", False, marks=pytest.mark.long),
    ],
)
def test_layouts(
    ranks: Any, logits: Any, tmp_path: Path, name: str, sequence_parallel: bool
) -> None:
    sizes = token_jobs.layout(name)
    told, *others = ranks.run(
        *(token_jobs.predict, sizes, tmp_path, sequence_parallel), world_size=sizes.world_size
    )
    assert others == [None] * (sizes.world_size - 1)
    (columns,) = told
    assert columns["output"].dtype == np.float32
    assert columns["idx"].tolist() == list(range(33))
    np.testing.assert_allclose(columns["output"], logits, atol=1e-5)
    assert columns["label"] is columns["latent"] is None
