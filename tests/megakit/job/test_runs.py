"""What makes another run; a run directory has one writer, which notices when it loses its place."""

import os
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from megakit.errors import RunDirectoryLostError, UserError
from megakit.job import Stage, TrainingOptions
from megakit.job.interactive import open_run
from megakit.job.runs import RunDirectory, check_still_ours, lock
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import make_run, prepare_run
from tests.refusals import problem as problem_of

STAGE = Stage("first")


@dataclass(kw_only=True)
class Options(TrainingOptions):
    fruits: Path | None = None
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
    **{"fruits": Path("elsewhere")},
}


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(output_dir=tmp_path, accelerator="cpu")


def test_every_option_is_in_one_of_the_tables() -> None:
    names = {option.name for option in fields(Options)}
    assert DECIDE.keys() | MAY_CHANGE.keys() == names - {"output_dir", "fresh"}


@pytest.mark.parametrize(("name", "value"), MAY_CHANGE.items())
def test_what_may_change_between_starts(options: Options, name: str, value: Any) -> None:
    make_run(STAGE, options, (10,), done=False)
    changes: dict[str, Any] = {"devices": 2, name: value}
    assert prepare_run(STAGE, replace(options, **changes)).resume


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


def test_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with lock(folder).file:
        told = problem_of(lock, folder)
        for part in (f"{folder} is in use by process {os.getpid()} ", "--output-dir"):
            assert part in told
        lock(tmp_path / "runs" / "second").file.close()
    lock(folder).file.close()


def test_a_directory_that_was_removed_or_replaced(tmp_path: Path) -> None:
    """The open file keeps its inode from being given to the new lock file."""
    folder = tmp_path / "first"
    own = lock(folder)
    check_still_ours(folder, own.inode)
    shutil.rmtree(folder)
    with pytest.raises(RunDirectoryLostError, match=f"{folder} was removed or renamed"):
        check_still_ours(folder, own.inode)
    with lock(folder).file, pytest.raises(RunDirectoryLostError, match=f"{folder} was replaced"):
        check_still_ours(folder, own.inode)
    own.file.close()


def test_an_old_run_is_set_aside_under_the_first_free_name(tmp_path: Path) -> None:
    for expected in ("first.1", "first.2"):
        directory = RunDirectory(tmp_path / "first")
        directory.path.mkdir()
        assert directory.set_aside() == tmp_path / expected


def test_a_withdrawn_run_gives_its_place_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "first")
    (directory.path / "checkpoints" / "step=000001").mkdir(parents=True)
    old = directory.set_aside()
    directory.path.mkdir()
    directory.write({"seed": 1}, {})
    assert directory.withdraw(old)
    assert not old.exists()
    assert not directory.withdraw(None), "a run with a checkpoint stays"


def test_several_processes_are_refused(tmp_path: Path) -> None:
    options = PretrainOptions(dataset="digits", accelerator="cpu", output_dir=tmp_path, devices=2)
    run = open_run(PRETRAIN, options)
    with pytest.raises(UserError, match=r"--devices 2: .* single process.*model_pretrain\.py"):
        run.__enter__()
