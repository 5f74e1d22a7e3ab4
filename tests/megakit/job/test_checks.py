"""Checks before a job: each problem is reported together with the others."""

from dataclasses import dataclass

import pytest

from megakit.errors import UserError
from megakit.job import checks
from megakit.job.cluster import Cluster
from megakit.job.preparation import prepare
from megakit.reporting.console import Console
from megakit.runtime.accelerator import Accelerator
from model_pretrain import PRETRAIN, PretrainOptions
from tests.megakit.job.stages import SECOND, SecondOptions


def problems_of(stage, options):
    with pytest.raises(UserError) as caught:
        prepare(stage, options, Cluster(), Console())
    return list(caught.value.problems)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("two\nlines"), "the data: the check failed (two"),
        (PermissionError(13, "Permission denied", "/data"), "/data: Permission denied."),
    ],
    ids=str,
)
def test_whatever_a_check_raises_is_a_problem_among_others(
    tmp_path, monkeypatch, capsys, error, said, verbose
):
    def fail(*_, **__):
        raise error

    options = PretrainOptions(
        output_dir=tmp_path / "runs", dataset="digits", lr=-1, verbose=verbose
    )
    monkeypatch.setattr(PretrainOptions, "resolve_dataset", fail)
    lr, data = problems_of(PRETRAIN, options)
    assert lr.startswith("--lr -1: ")
    assert data.startswith(said)
    assert ("Traceback" in capsys.readouterr().err) == verbose


@dataclass(kw_only=True)
class RefusingOptions(SecondOptions):
    def resolve_dataset(self, previous, report, may_download=True):
        report("downloading")
        assert not may_download
        raise UserError("--dataset plums: there are none.")


def test_all_problems_are_reported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checks, "find_accelerator", lambda *_, **__: Accelerator("gpu", "x", 1))
    (tmp_path / "second").write_text("a file")
    options = RefusingOptions(output_dir=tmp_path, lr=-1, devices=4, tensor_parallel=3)
    assert [problem.split(":")[0] for problem in problems_of(SECOND, options)] == [
        "--lr -1",
        "--tensor-parallel 3 x --pipeline-parallel 1 = 3",
        "--tensor-parallel 3",  # a stage that states no width has width 1
        f"--output-dir {tmp_path / 'second'}",
        "--devices 4",
        f"{tmp_path / 'first' / 'checkpoints'}",
        "--dataset plums",
    ]
    assert capsys.readouterr().err == ""
