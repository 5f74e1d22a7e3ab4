"""What fails while a job is prepared is a refusal, and changes nothing."""

import pytest

from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.preparation import prepare
from megakit.reporting.console import Console
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import make_run


def test_what_fails_between_the_checks_is_a_problem_too(tmp_path, monkeypatch):
    def fail(*arguments):
        raise RecursionError("deep")

    options = PretrainOptions(output_dir=tmp_path / "runs", dataset="digits", accelerator="cpu")
    monkeypatch.setattr("megakit.job.preparation.find_resumption", fail)
    with pytest.raises(UserError, match=r"the preparation: the check failed \(Rec.*deep"):
        prepare(PRETRAIN, options, Cluster(), Console(silent=True))


def test_a_fresh_start_that_fails_gives_the_old_run_its_name_back(tmp_path, monkeypatch):
    options = PretrainOptions(
        dataset="digits", accelerator="cpu", output_dir=tmp_path, max_steps=20, fresh=True
    )
    old = make_run(PRETRAIN, options, (10,))

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megakit.job.runs.RunDirectory.write_identity", fail)
    with pytest.raises(UserError, match="No space left on device"):
        prepare(PRETRAIN, options, Cluster(), Console(silent=True))
    assert [path.name for path in tmp_path.iterdir()] == ["pretrain"]
    assert old.newest_step == 20
