"""docs/concepts.md: its code stands in the project, and its errors and numbers are what happens."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakit.testing import RankError, Ranks
from tests.docs.demands_of_data import (
    classifier_of,
    loaded_by_torch,
    missing_weight,
    module_without_io,
    no_data_sampler,
    own_shards,
    random_effects,
    saved_autoencoder,
    saved_by_torch,
    shuffling_loader,
    validated_samples,
)
from tests.docs.demands_of_models import (
    dropout_mask,
    loss_of_own_samples,
    loss_of_torch,
    loss_without_report,
    model_built_early,
    no_set_input_tensor,
    place_of_gradients,
    plain_linear_of_full_width,
    replicated_layer,
    stage_of_another_shape,
    training_step_returns_loss,
    training_step_runs_backward,
    unused_weight,
)
from tests.scripts import REPOSITORY

PAGE = REPOSITORY / "docs" / "concepts.md"
TEXT = PAGE.read_text()
#: What the page shows of experiments, by name: `<!-- observed: NAME -->` before a block.
SHOWN = dict(re.findall(r"<!-- observed: (\w+) -->\n```text\n(.*?)\n```", TEXT, re.DOTALL))
#: Quoted code, after a line that ends with "`FILE`:".
QUOTED = re.findall(r"`([\w/]+\.py)`:\n\n```python\n(.*?)```", TEXT, re.DOTALL)
DEMANDS = re.findall(r"^### \d+\. .*?(?=^##)", TEXT, re.DOTALL | re.MULTILINE)
NUMBER = r"-?\d+\.\d+"

#: One experiment: the function, its arguments, and the number of ranks.
Experiment = tuple[Callable[..., Any], tuple[Any, ...], int]
ERRORS: dict[str, Experiment] = {
    "loss_of_torch": (loss_of_torch, (), 1),
    "loss_without_report": (loss_without_report, (), 1),
    "no_data_sampler": (no_data_sampler, (), 1),
    "model_built_early": (model_built_early, (), 1),
    "plain_linear_of_full_width": (plain_linear_of_full_width, (), 2),
    "no_set_input_tensor": (no_set_input_tensor, (), 1),
    "training_step_returns_loss": (training_step_returns_loss, (), 1),
    "training_step_runs_backward": (training_step_runs_backward, (), 1),
    "unused_weight": (unused_weight, (True,), 2),
    "place_of_gradients": (place_of_gradients, (), 1),
    "shuffling_loader": (shuffling_loader, (), 1),
}
#: Experiments with and without the demanded property.
COMPARED: dict[str, Experiment] = {
    "loss_of_own_samples": (loss_of_own_samples, (), 2),
    "random_effects": (random_effects, (), 2),
    "replicated_layer": (replicated_layer, (), 2),
    "validated_samples": (validated_samples, (), 1),
}
#: Experiments that write files, or kill a rank; each has its own test.
OTHERS = {
    *("loaded_by_torch", "own_shards", "module_without_io", "classifier_of"),
    "missing_weight",
    *("dropout_mask", "stage_of_another_shape"),
}


def told(answers: list[str]) -> str:
    """The answers of all ranks; one answer if all are equal."""
    if len(set(answers)) == 1:
        return answers[0]
    return ", ".join(f"{answer} on rank {rank}" for rank, answer in enumerate(answers))


def assert_shown(name: str, observed: str) -> None:
    """Compares what was observed with what the page shows.

    Numbers with a point may differ by rounding. A line that ends with `...` may be the beginning of
    a longer line, and a last line `...` stands for further lines.
    """
    shown, found = SHOWN[name].splitlines(), observed.strip().splitlines()
    if shown[-1] == "...":
        shown = shown[:-1]
        found = found[: len(shown)]
    assert len(shown) == len(found), f"{name}: {observed}"
    for expected, line in zip(shown, found, strict=True):
        if expected.endswith("..."):
            assert line.startswith(expected.removesuffix("...")), observed
            continue
        assert re.sub(NUMBER, "N", expected) == re.sub(NUMBER, "N", line), observed
        numbers = [[float(n) for n in re.findall(NUMBER, text)] for text in (expected, line)]
        assert numbers[0] == pytest.approx(numbers[1], rel=2e-3), observed


def test_differences_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHOWN, "example", "loss 0.2192 here\nmo...")
    assert_shown("example", "loss 0.2191 here\nmore")
    for observed in ("loss 0.2291 here\nmore", "loss 0.2191 there\nmore", "loss 0.2191 here"):
        with pytest.raises(AssertionError):
            assert_shown("example", observed)


def test_every_observation_is_tested() -> None:
    assert SHOWN.keys() == ERRORS.keys() | COMPARED.keys() | OTHERS


@pytest.mark.parametrize("name", ERRORS)
def test_errors(ranks: Ranks, name: str) -> None:
    function, arguments, world_size = ERRORS[name]
    assert_shown(name, told(ranks.run(function, *arguments, world_size=world_size)))


@pytest.mark.parametrize("name", COMPARED)
def test_wrong_numbers(ranks: Ranks, name: str) -> None:
    function, _, world_size = COMPARED[name]
    kept, without = (
        told(ranks.run(function, kept, world_size=world_size)) for kept in (True, False)
    )
    assert_shown(name, f"with:    {kept}\nwithout: {without}")
    assert " on rank " not in kept


def test_an_unused_weight_is_no_error_without_overlap(ranks: Ranks) -> None:
    """Its gradient is 0, so the optimizer does not change it."""
    assert ranks.run(unused_weight, False, world_size=2) == ["1.0"] * 2


def test_dropout_masks(ranks: Ranks) -> None:
    """How many positions are equal by chance depends on the processor's random numbers."""
    with_tracker, without = (
        np.mean(np.equal(*map(np.array, ranks.run(dropout_mask, kept, world_size=2))))
        for kept in (True, False)
    )
    assert with_tracker == pytest.approx(0.5, abs=0.15)
    assert without == 1
    shape = np.shape(ranks.run(dropout_mask, True, world_size=2)[0])
    assert_shown(
        "dropout_mask",
        f"with:    about half of {np.prod(shape)} positions are equal\n"
        f"without: all {np.prod(shape)} positions are equal",
    )


def test_a_file_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(saved_by_torch, tmp_path, world_size=2)
    assert_shown("loaded_by_torch", told(ranks.run(loaded_by_torch, tmp_path, world_size=1)))


def test_own_shards(ranks: Ranks, tmp_path: Path) -> None:
    kept, without = (
        told(ranks.run(own_shards, tmp_path, kept, world_size=2)) for kept in (True, False)
    )
    assert_shown("own_shards", f"with:    {kept}\nwithout: {without}")


def test_a_checkpoint_has_one_of_two_replicas(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(replicated_layer, False, tmp_path / "saved", world_size=2)
    assert saved == ["(3, 3)"] * 2


def test_a_module_without_io(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(module_without_io, tmp_path / "saved", world_size=1)
    assert_shown("module_without_io", told(answers))


def test_partial_loading(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(saved_autoencoder, tmp_path, world_size=1)
    assert_shown("missing_weight", told(ranks.run(missing_weight, tmp_path, world_size=1)))
    assert_shown("classifier_of", told(ranks.run(classifier_of, tmp_path, (), world_size=1)))
    (loaded,) = ranks.run(classifier_of, tmp_path, ("digit_classifier",), world_size=1)
    assert "digit_classifier.weight" in loaded
    assert "linear1" not in loaded


@pytest.mark.long
def test_a_stage_of_another_shape(ranks: Ranks) -> None:
    """gloo ends the process, so the pool is this test's own; `ranks` registers `fitting`."""
    with Ranks(2) as own, pytest.raises(RankError) as error:
        own.run(stage_of_another_shape)
    (line,) = set(re.findall(r"op\.preamble.*", str(error.value)))
    assert_shown("stage_of_another_shape", line)


def test_there_are_eleven_demands() -> None:
    assert len(DEMANDS) == 11
    for demand in DEMANDS:
        assert "```python" in demand, demand
        assert "<!-- observed: " in demand, demand
        assert re.search(r"\]\(https://(docs\.nvidia\.com|lightning\.ai)/", demand), demand


def test_code_is_quoted_from_the_project() -> None:
    assert len(QUOTED) >= 11
    assert len(QUOTED) == TEXT.count("```python")
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
