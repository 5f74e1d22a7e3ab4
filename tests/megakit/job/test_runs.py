"""What makes another run, and what a run keeps."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from megakit.job import Stage, TrainingOptions
from megakit.job.runs import RunDirectory
from megakit.job.start_checkpoint import find_start
from tests.fabricate import make_run, prepare_run
from tests.refusals import problem as problem_of

STAGE = Stage("first")


@dataclass(kw_only=True)
class Options(TrainingOptions):
    fruits: Path | None = None
    checkpoint: str | None = None
    kind: str = "plums"

    def fingerprint(self) -> str:
        return self.kind


#: Every option with another value than the default: those that make another run, and the others.
DECIDE = {
    **{"seed": 1, "precision": "32", "global_batch_size": 128, "lr": 0.5, "max_steps": 7},
    **{"limit_val_batches": 3, "kind": "pears", "best_by": "val_other", "stop_after": 3},
}
MAY_CHANGE = {
    **{"devices": 4, "num_nodes": 1, "tensor_parallel": 2, "pipeline_parallel": 2},
    **{"micro_batch_size": 8, "num_workers": 2, "verbose": True, "timeout": 5},
    **{"val_interval": 3, "save_interval": 7, "accelerator": "auto", "keep_changes": True},
    **{"fruits": Path("elsewhere"), "checkpoint": "another"},
}


@dataclass(kw_only=True)
class LongerOptions(Options):
    resumable_options = Options.resumable_options | {"max_steps"}


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(output_dir=tmp_path, accelerator="cpu")


def test_every_option_is_in_one_of_the_tables() -> None:
    names = {option.name for option in fields(Options)}
    assert DECIDE.keys() | MAY_CHANGE.keys() == names - {"output_dir", "fresh"}


@pytest.mark.parametrize(("name", "value"), DECIDE.items())
def test_what_makes_another_run(options: Options, name: str, value: Any) -> None:
    options = replace(options, precision="bf16-mixed")
    make_run(STAGE, options, (10,), done=False)
    changes: dict[str, Any] = {name: value}
    problem = problem_of(prepare_run, STAGE, replace(options, **changes))
    option = "--" + name.replace("_", "-")
    assert f"{option} was {getattr(options, name)}, now {value}" in problem


def test_the_intervals_of_a_run_that_may_end_early_decide(options: Options) -> None:
    options = replace(options, stop_after=2)
    make_run(STAGE, options, (10,), done=False)
    problem = problem_of(prepare_run, STAGE, replace(options, val_interval=100))
    assert "--val-interval was 250, now 100" in problem


@pytest.mark.parametrize("precision", ["bf16-mixed", "32"])
def test_a_run_keeps_its_precision(options: Options, precision: Any) -> None:
    """Also on a machine where another one is the default."""
    make_run(STAGE, replace(options, precision=precision), (10,), done=False)
    plan = prepare_run(STAGE, options)
    assert plan.resume
    assert plan.precision == plan.identity["precision"] == precision


def test_an_old_run_is_set_aside_under_the_first_free_name(tmp_path: Path) -> None:
    for expected in ("first.1", "first.2"):
        directory = RunDirectory(tmp_path / "first")
        directory.path.mkdir()
        assert directory.set_aside() == tmp_path / expected


@pytest.mark.parametrize("best_by", ["val_loss", "last"])
def test_a_run_as_start_checkpoint_means_its_best(options: Options, best_by: str) -> None:
    before = make_run(STAGE, replace(options, best_by=best_by), (20, 10), done=False)
    given = replace(options, checkpoint=str(before.path), output_dir=options.output_dir / "new")
    plan = prepare_run(Stage("second", STAGE), given)
    assert plan.start == str(before.checkpoints / "step=000020")


@pytest.mark.parametrize(("kind", "told"), [(Options, [True]), (LongerOptions, [])])
def test_a_stage_says_that_the_run_before_has_not_ended_if_it_is_known(
    tmp_path: Path, kind: type[Options], told: list[bool]
) -> None:
    """The manifest of a run that may resume with other max_steps does not have the number."""
    options = kind(output_dir=tmp_path, accelerator="cpu", max_steps=20)
    make_run(STAGE, options, (10,), done=False)
    said: list[str] = []
    start = find_start(Stage("second", STAGE), None, tmp_path, said.append)
    assert start is not None
    start.file.close()
    assert ["has not ended" in line for line in said] == told
