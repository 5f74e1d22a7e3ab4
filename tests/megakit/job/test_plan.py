"""What makes another run, and what a run keeps."""

import errno
import fcntl
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megakit.job import Stage, TrainingOptions
from megakit.job.cluster import Cluster
from megakit.job.console import Console
from megakit.job.notebook import open_run
from megakit.job.plan import begin, plan
from megakit.job.run_directory import RunDirectory
from megakit.runtime.atomic_files import set_aside
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
MAY_CHANGE: dict[str, Any] = {
    **{"devices": 4, "num_nodes": 1, "tensor_parallel": 2, "pipeline_parallel": 2},
    **{"micro_batch_size": 8, "num_workers": 2, "verbose": True, "timeout": 5},
    **{"val_interval": 3, "save_interval": 7, "accelerator": "auto"},
    **{"fruits": Path("elsewhere"), "checkpoint": "another"},
}


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(output_dir=tmp_path, accelerator="cpu")


def test_what_may_change(options: Options) -> None:
    """Every option is in one of the tables."""
    names = {option.name for option in fields(Options)}
    assert DECIDE.keys() | MAY_CHANGE.keys() == names - {"output_dir", "fresh"}
    assert replace(options, **MAY_CHANGE).identity() == options.identity()


@pytest.mark.parametrize(("name", "value"), [*DECIDE.items(), ("val_interval", 100)])
def test_what_makes_another_run(options: Options, name: str, value: Any) -> None:
    """If a run may end early, the interval of the validations decides, too."""
    options = replace(options, precision="bf16-mixed", stop_after=2)
    make_run(STAGE, options, (10,), done=False)
    problem = problem_of(prepare_run, STAGE, replace(options, **{name: value}))
    option = "--" + name.replace("_", "-")
    assert f"{option} was {getattr(options, name)}, now {value}" in problem


@pytest.mark.parametrize("precision", ["bf16-mixed", "32"])
def test_a_run_keeps_its_precision(options: Options, precision: Any) -> None:
    """Also on a machine where another one is the default."""
    make_run(STAGE, replace(options, precision=precision), (10,), done=False)
    run = prepare_run(STAGE, options)
    assert run.resume
    assert run.precision == run.identity["precision"] == precision


def test_a_run_as_start_checkpoint_means_its_best(options: Options) -> None:
    before = make_run(STAGE, options, (20, 10), done=False)
    given = replace(options, checkpoint=str(before.path), output_dir=options.output_dir / "new")
    run = prepare_run(Stage("second", STAGE), given)
    assert run.start == str(before.checkpoints / "step=000020")


def test_a_run_with_a_summary_is_not_done_before_its_last_step(options: Options) -> None:
    make_run(STAGE, options, (10,), done=False).summary.touch()
    assert not prepare_run(STAGE, options).is_done


def test_a_directory_that_another_process_has_begun_since_the_plan(options: Options) -> None:
    first, late = (plan(STAGE, options, Cluster(), Console(silent=True)) for _ in range(2))
    begin(first)
    assert f"{first.path} is in use by process" in problem_of(begin, late)
    first.close()
    make_run(STAGE, options, (10,), done=False)
    assert "another process has begun this run" in problem_of(begin, late)
    late.close()


def test_a_notebook_can_open_a_run_again_after_an_error(options: Options) -> None:
    """It keeps the last error, and by the error what the block had opened."""
    record = options.output_dir / "first" / "run.json"
    record.mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as kept, open_run(STAGE, options):
        raise AssertionError("run.json cannot be written")
    RunDirectory(record.parent).lock().close()
    assert kept


def test_a_file_system_without_locks(tmp_path: Path) -> None:
    refusal = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    with mock.patch.object(fcntl, "flock", side_effect=refusal):
        told = problem_of(RunDirectory(tmp_path).lock)
    assert f"{tmp_path}/.lock: cannot be created, opened or locked (No locks available)." in told


def test_a_directory_that_is_set_aside_while_it_is_locked(tmp_path: Path) -> None:
    """Two starts at once, one of them with --fresh, do not both get the directory."""
    directory, flock, taken = RunDirectory(tmp_path / "first"), fcntl.flock, list[Any]()
    with directory.lock() as old, mock.patch.object(fcntl, "flock") as late:

        def replace_directory(*arguments: Any) -> None:
            late.side_effect = flock
            set_aside(directory.path, directory.path.name)
            old.close()
            taken.append(directory.lock())
            flock(*arguments)

        late.side_effect = replace_directory
        assert "is in use by process" in problem_of(directory.lock)
    taken[0].close()
