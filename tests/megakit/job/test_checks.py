"""Checks before a job: each problem is reported together with the others."""

import pytest

from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.preparation import prepare
from megakit.reporting.console import Console
from megakit.runtime.foreign_files import reason_of
from model_pretrain import PRETRAIN, PretrainOptions


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), ValueError("two\nlines")])
def test_whatever_a_check_raises_is_a_problem_among_others(tmp_path, monkeypatch, error):
    def fail(*arguments):
        raise error

    options = PretrainOptions(output_dir=tmp_path / "runs", dataset="digits", lr=-1)
    monkeypatch.setattr(PretrainOptions, "resolve_dataset", fail)
    monkeypatch.setattr("megakit.job.checks.find_accelerator", fail)
    with pytest.raises(UserError) as caught:
        prepare(PRETRAIN, options, Cluster(), Console(silent=True))
    named = [problem.split(":")[0] for problem in caught.value.problems]
    assert named == ["--lr -1", "--accelerator auto", "the data"]
    assert all(reason_of(error) in problem for problem in caught.value.problems[1:])
