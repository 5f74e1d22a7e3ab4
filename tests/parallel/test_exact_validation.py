"""A validation's values are means over all its tokens, as plain PyTorch computes them."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from megakit.checkpoints import read_manifest
from tests.left_behind import curves
from tests.parallel import token_jobs
from tests.scripts import read_csv

#: The layouts of the short suite.
SHORT = ("one process", "pp2")


@pytest.fixture(scope="session")
def exact(ranks: Any) -> Any:
    cloudpickle.register_pickle_by_value(token_jobs)  # ranks cannot import it

    @cache
    def compute(num_blocks: int | None = None) -> float:
        ((loss, _),) = ranks.run(token_jobs.exact, num_blocks, world_size=1)
        return float(loss)

    return compute


def is_exactly(value: float) -> Any:
    return pytest.approx(value, abs=1e-6, rel=0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SHORT else pytest.mark.long)
        for name in token_jobs.LAYOUTS
    ],
)
def test_every_layout(ranks: Any, exact: Any, tmp_path: Path, name: str) -> None:
    sizes = token_jobs.layout(name)
    found = ranks.run(token_jobs.validate, sizes, tmp_path, world_size=sizes.world_size)
    assert found[0] == {
        "val_loss": is_exactly(exact()),
        "val_bits": is_exactly(exact() / math.log(2)),
    }
    assert all(values == found[0] for values in found)


@pytest.mark.long
@pytest.mark.parametrize("name", ["one process", "dp2", "pp2"])
def test_a_loss_with_another_base_class_may_name_its_number_of_tokens(
    ranks: Any, exact: Any, tmp_path: Path, name: str
) -> None:
    sizes = token_jobs.layout(name)
    for found in ranks.run(
        token_jobs.validate, sizes, tmp_path, "own", world_size=sizes.world_size
    ):
        bits = exact() / math.log(2)
        assert found == {"val_loss": is_exactly(exact()), "val_bits": is_exactly(bits)}


@pytest.mark.parametrize(
    ("loss", "factor"), [("token mean", 1), ("doubled", 2), ("masked", 0)], ids=str
)
def test_a_loss_without_further_values(
    ranks: Any, exact: Any, tmp_path: Path, loss: str, factor: int
) -> None:
    """Also if a subclass changes the mean; a validation without a token has the mean 0."""
    sizes = token_jobs.layout("pp2")
    for found in ranks.run(token_jobs.validate, sizes, tmp_path, loss, world_size=2):
        assert found == {"val_loss": pytest.approx(factor * exact(), abs=2e-6, rel=0)}


@pytest.mark.long
def test_a_part_of_the_validation_set(ranks: Any, exact: Any, tmp_path: Path) -> None:
    sizes = token_jobs.layout("dp2")
    for found in ranks.run(token_jobs.validate, sizes, tmp_path, "values", 2, world_size=2):
        assert found["val_loss"] == is_exactly(exact(12))
    assert abs(exact(12) - exact()) > 1e-3


@pytest.mark.long
def test_the_loss_works_with_the_strategy_of_nemo(ranks: Any, exact: Any, tmp_path: Path) -> None:
    """NeMo's strategy gives each step the same weight."""
    (found,) = ranks.run(
        *(token_jobs.validate, token_jobs.layout("one process"), tmp_path),
        *("token mean", None, True),
        world_size=1,
    )
    assert found == {"val_loss": pytest.approx(exact(), rel=0.2)}


@pytest.mark.long
@pytest.mark.parametrize("name", ["one process", "dp2"])
def test_a_training(ranks: Any, tmp_path: Path, name: str) -> None:
    """The number of tokens is no value of its own; a metric of torchmetrics is as exact."""
    sizes = token_jobs.layout(name)
    for found in ranks.run(token_jobs.train, sizes, tmp_path, world_size=sizes.world_size):
        exact = found.pop("exact")
        assert found == {
            "val_loss": is_exactly(exact),
            "val_bits": is_exactly(exact / math.log(2)),
            "val_mean": pytest.approx(exact, abs=1e-5, rel=0),
        }
    rows = read_csv(tmp_path / "stage" / "metrics.csv")
    assert list(rows[0])[6:] == ["train_bits", "val_bits", "val_mean"]
    assert float(rows[-1]["val_loss"]) == is_exactly(exact)
    assert [name for name in curves(tmp_path / "stage" / "tensorboard") if "tokens" in name] == []
    manifest = read_manifest(tmp_path / "stage" / "checkpoints" / "step=000004")
    assert manifest.val_loss == is_exactly(exact)
    assert manifest.values.keys() == {"val_bits", "val_mean"}
