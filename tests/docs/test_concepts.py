"""docs/concepts.md: its code stands in the project, and its numbers are what happens."""

import re
from pathlib import Path
from typing import Any

import pytest

from megakit.testing import RankError, Ranks
from tests.scripts import REPOSITORY

TEXT = (REPOSITORY / "docs" / "concepts.md").read_text()
#: What the page shows of experiments, by name: `<!-- observed: NAME -->` before a block.
SHOWN = dict(re.findall(r"<!-- observed: (\w+) -->\n```text\n(.*?)\n```", TEXT, re.DOTALL))
#: Quoted code, after a line that ends with "`FILE`:".
QUOTED = re.findall(r"`([\w/]+\.py)`:\n\n```python\n(.*?)```", TEXT, re.DOTALL)
NUMBER = r"-?\d+\.\d+"
#: Experiments on one rank; the others have two.
ON_ONE_RANK = {
    *("loss_of_torch", "shuffling_loader", "validated_samples", "loaded_by_torch"),
    "place_of_gradients",
}


def observe(name: str, *arguments: Any) -> str:
    """Runs an experiment; its module imports the frameworks, which only a rank may do."""
    from tests.docs import demands

    answer: str = getattr(demands, name)(*arguments)
    return answer


def told(ranks: Ranks, name: str, *arguments: Any) -> str:
    """The answers of all ranks; one answer if all are equal."""
    answers = ranks.run(observe, name, *arguments, world_size=1 if name in ON_ONE_RANK else 2)
    if len(set(answers)) == 1:
        return answers[0]
    return ", ".join(f"{answer} on rank {rank}" for rank, answer in enumerate(answers))


@pytest.mark.parametrize("name", sorted(SHOWN.keys() - {"stage_of_another_shape"}))
def test_experiments(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Numbers with a point may differ by rounding."""
    arguments = [tmp_path] if name in ("loaded_by_torch", "own_shards") else []
    if name == "loaded_by_torch":
        ranks.run(observe, "saved_by_torch", tmp_path, world_size=2)
    if SHOWN[name].startswith("with:"):
        kept, without = (told(ranks, name, kept, *arguments) for kept in (True, False))
        found = f"with:    {kept}\nwithout: {without}"
    else:
        found = told(ranks, name, *arguments).strip()
    assert re.sub(NUMBER, "N", SHOWN[name]) == re.sub(NUMBER, "N", found)
    shown, observed = ([*map(float, re.findall(NUMBER, t))] for t in (SHOWN[name], found))
    assert shown == pytest.approx(observed, rel=2e-3)


def test_an_unused_weight_is_no_error_without_overlap(ranks: Ranks) -> None:
    """Its gradient is 0, so the optimizer does not change it."""
    assert told(ranks, "unused_weight", False) == "1.0"


@pytest.mark.long
def test_a_stage_of_another_shape(ranks: Ranks) -> None:
    """gloo ends the process, so the pool is this test's own."""
    with Ranks(2) as own, pytest.raises(RankError) as error:
        own.run(observe, "stage_of_another_shape")
    assert set(re.findall(r"op\.preamble.*", str(error.value))) == {SHOWN["stage_of_another_shape"]}


def test_code_is_quoted_from_the_project() -> None:
    assert len(QUOTED) == TEXT.count("```python") >= 11
    for file, code in QUOTED:
        lines = [line.strip() for line in (REPOSITORY / file).read_text().splitlines()]
        source = "\n".join(line for line in lines if line)
        for part in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):
            quoted = "\n".join(line.strip() for line in part.splitlines() if line.strip())
            assert quoted in source, f"{file} lacks:\n{quoted}"


def test_versions_are_those_of_the_lock() -> None:
    lock = (REPOSITORY / "requirements.lock").read_text()
    names = {"Lightning": "lightning", "NeMo 2": "nemo-toolkit", "Megatron-Core": "megatron-core"}
    for name, package in names.items():
        (version,) = re.findall(rf"^{package}(?:\[.*\])?==([\d.]+)", lock, re.MULTILINE)
        assert f"**{name}** ({version})" in TEXT
