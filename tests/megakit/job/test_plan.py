"""The plan, as the launcher hands it to its ranks, and checks of the preparation that fail."""

import json
import os

import pytest

from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.layout import Layout
from megakit.job.plan import PLAN_VARIABLE, Plan, prepare
from megakit.reporting.console import Console
from megakit.runtime.accelerator import Accelerator
from megakit.runtime.foreign_files import reason_of
from model_pretrain import PRETRAIN, PretrainOptions

PLAN = Plan("digits", None, None, Accelerator("cpu", "x", 1), Layout(2, 1, 1, 1, 8, 4), {}, False)
PARENT = os.getppid()


def handed_on(**changes):
    """What a rank finds, whose parent this process's parent is."""
    return json.dumps({**json.loads(PLAN.for_ranks()), "launcher": PARENT, **changes})


def test_a_rank_gets_its_launcher_s_plan():
    assert Plan.of_launcher(handed_on()) == PLAN
    assert json.loads(PLAN.for_ranks())["launcher"] == os.getpid()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "0", "[" * 100_000, "\udcff", handed_on(launcher=PARENT + 1)),
        *(handed_on(launcher=str(PARENT)), handed_on(plan=None), handed_on(plan="{}")),
        handed_on(plan=json.dumps({"accelerator": {}, "layout": 3})),
        handed_on(plan=json.dumps({**json.loads(PLAN.to_json()), "more": 1})),
    ],
)
def test_another_s_or_a_damaged_plan_is_refused(text):
    with pytest.raises(UserError) as caught:
        Plan.of_launcher(text)
    (problem,) = caught.value.problems
    assert problem.startswith(f"the environment variable {PLAN_VARIABLE}: cannot be read (")
    assert len(problem.splitlines()) == 1


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), ValueError("two\nlines")])
def test_whatever_a_check_raises_is_a_problem_among_others(tmp_path, monkeypatch, error):
    def fail(*arguments):
        raise error

    options = PretrainOptions(output_dir=tmp_path / "runs", dataset="digits", lr=-1)
    monkeypatch.setattr(PretrainOptions, "resolve_dataset", fail)
    monkeypatch.setattr("megakit.job.plan.find_accelerator", fail)
    with pytest.raises(UserError) as caught:
        prepare(PRETRAIN, options, Cluster(), Console(silent=True))
    named = [problem.split(":")[0] for problem in caught.value.problems]
    assert named == ["--lr -1", "--accelerator auto", "the data"]
    assert all(reason_of(error) in problem for problem in caught.value.problems[1:])


def test_what_fails_between_the_checks_is_a_problem_too(tmp_path, monkeypatch):
    def fail(*arguments):
        raise RecursionError("deep")

    options = PretrainOptions(output_dir=tmp_path / "runs", dataset="digits", accelerator="cpu")
    monkeypatch.setattr("megakit.job.plan.find_resumption", fail)
    with pytest.raises(UserError, match=r"the preparation: the check failed \(Rec.*deep"):
        prepare(PRETRAIN, options, Cluster(), Console(silent=True))
