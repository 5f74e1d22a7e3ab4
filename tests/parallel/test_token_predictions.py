"""Predictions of a model over tokens: without labels, with a mask of tokens, in any layout."""

from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.parallel import token_jobs

#: The layouts of the short suite.
SHORT = ("one process", "pp2")


@pytest.fixture(scope="session")
def logits(ranks: Any) -> NDArray[np.float32]:
    cloudpickle.register_pickle_by_value(token_jobs)  # ranks cannot import it
    ((_, logits),) = ranks.run(token_jobs.exact, world_size=1)
    assert logits.shape == (33, 16, 32)
    return logits


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SHORT else pytest.mark.long)
        for name in token_jobs.LAYOUTS
    ],
)
def test_every_layout(ranks: Any, logits: Any, tmp_path: Path, name: str) -> None:
    sizes = token_jobs.layout(name)
    told, *others = ranks.run(token_jobs.predict, sizes, tmp_path, world_size=sizes.world_size)
    assert others == [None] * (sizes.world_size - 1)
    in_memory, (on_disk,) = told
    assert in_memory["output"].dtype == np.float32
    order = np.argsort(in_memory["idx"])
    assert in_memory["idx"][order].tolist() == on_disk["idx"].tolist() == list(range(33))
    np.testing.assert_allclose(on_disk["output"], logits, atol=1e-5)
    assert np.array_equal(in_memory["output"][order], on_disk["output"])
    for columns in (in_memory, on_disk):
        assert columns["label"] is columns["latent"] is None


def test_an_output_without_an_index(ranks: Any, logits: Any, tmp_path: Path) -> None:
    sizes = token_jobs.layout("one process")
    with pytest.raises(Exception, match="returned output, loss_mask without a tensor for idx"):
        ranks.run(token_jobs.predict, sizes, tmp_path, "idx", world_size=1)
