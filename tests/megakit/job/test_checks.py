"""Checks before a job: each problem is reported together with the others."""

from dataclasses import dataclass

import pytest

from megakit.errors import UserError
from megakit.job import checks
from megakit.job.cluster import Cluster
from megakit.job.preparation import prepare
from megakit.reporting.console import Console
from megakit.runtime.accelerator import Accelerator
from megakit.runtime.foreign_files import reason_of
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import prepare_run
from tests.megakit.job.stages import FIRST, SECOND, FirstOptions, SecondOptions


def problems_of(stage, options):
    with pytest.raises(UserError) as caught:
        prepare(stage, options, Cluster(), Console())
    return list(caught.value.problems)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), ValueError("two\nlines")])
def test_whatever_a_check_raises_is_a_problem_among_others(
    tmp_path, monkeypatch, capsys, error, verbose
):
    def fail(*_, **__):
        raise error

    options = PretrainOptions(
        output_dir=tmp_path / "runs", dataset="digits", lr=-1, verbose=verbose
    )
    monkeypatch.setattr(PretrainOptions, "resolve_dataset", fail)
    monkeypatch.setattr("megakit.job.checks.find_accelerator", fail)
    problems = problems_of(PRETRAIN, options)
    named = [problem.split(":")[0] for problem in problems]
    assert named == ["--lr -1", "--accelerator auto", "the data"]
    assert all(reason_of(error) in problem for problem in problems[1:])
    assert capsys.readouterr().err.count("Traceback") == (2 if verbose else 0)


@dataclass(kw_only=True)
class RefusingOptions(SecondOptions):
    def resolve_dataset(self, previous, report, may_download=True):
        report("downloading")
        assert not may_download
        raise UserError("--dataset plums: there are none.")


def test_all_problems_are_reported_once(tmp_path, monkeypatch, capsys):
    def refuse():
        raise UserError("the loopback interface is down.")

    monkeypatch.setattr(checks, "find_limits", lambda number: [f"{number} processes are too many."])
    monkeypatch.setattr(checks, "ensure_loopback", refuse)
    monkeypatch.setattr(checks, "find_accelerator", lambda *_, **__: Accelerator("gpu", "x", 1))
    (tmp_path / "second").write_text("a file")
    options = RefusingOptions(
        output_dir=tmp_path, lr=-1, devices=4, tensor_parallel=3, num_workers=2
    )
    assert [problem.split(":")[0] for problem in problems_of(SECOND, options)] == [
        "--lr -1",
        "--tensor-parallel 3 x --pipeline-parallel 1 = 3",
        "--tensor-parallel 3",  # a stage that states no width has width 1
        "6 processes are too many.",
        f"--output-dir {tmp_path / 'second'}",
        "the loopback interface is down.",
        "--devices 4",
        f"{tmp_path / 'first' / 'checkpoints'}",
        "--dataset plums",
    ]
    assert capsys.readouterr().err == ""


def test_a_file_that_no_check_can_read_is_named(tmp_path, monkeypatch, options):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", "/dev/gpu")

    monkeypatch.setattr(checks, "find_accelerator", fail)
    assert problems_of(FIRST, options) == ["/dev/gpu: Permission denied."]


@dataclass(kw_only=True)
class SizedOptions(FirstOptions):
    hidden_size: int | None = None
    model_sizes = ("hidden_size",)

    def size(self, name):
        return self.hidden_size or 64


def test_sizes_of_the_model_are_part_of_the_run(options):
    sized = SizedOptions(**vars(options))
    assert prepare_run(FIRST, sized).identity["hidden_size"] == 64
