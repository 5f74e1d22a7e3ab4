"""The plan, as the launcher hands it to its ranks."""

import os
import tempfile
from dataclasses import replace

import pytest

from megakit.job.layout import Layout
from megakit.job.plan import PLAN_VARIABLE, Plan
from megakit.runtime.accelerator import Accelerator
from tests.scripts import output_of

LAYOUT = Layout(2, 1, 1, 1, 8, 4)
PLAN = Plan(
    "digits", None, None, Accelerator("cpu", "x", 1), "32", LAYOUT, {}, False, lock=(8, 123)
)


def load(text, *descriptors):
    """The plan of a rank with this process as its launcher, or the problem that it reports."""
    program = (
        "import os; from megakit.errors import UserError; from megakit.job.plan import Plan\n"
        "try: print(Plan.of_launcher(os.environ['MEGAKIT_PLAN']).to_json())\n"
        "except UserError as error: print(error)"
    )
    return output_of(program, descriptors=descriptors, MEGAKIT_PLAN=text).strip()


def test_a_rank_gets_its_launcher_s_plan():
    text, descriptor = PLAN.for_ranks()
    for _ in range(2):  # each rank reads the whole file
        assert Plan.from_json(load(text, descriptor)) == PLAN
    assert "another job set it" in load(f"1 {descriptor}", descriptor)
    os.close(descriptor)


def test_a_plan_may_be_longer_than_an_environment_variable():
    code = {f"some_module.function_{number}": 16 * "0" for number in range(10_000)}
    plan = replace(PLAN, identity={"code": code})
    text, descriptor = plan.for_ranks()
    assert Plan.from_json(load(text, descriptor)) == plan
    os.close(descriptor)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "1", "1 2 3", "\udcff", "1" * 5000 + " 1", "-1 -1"),
        *("OWN 999", "OWN -1"),  # OWN: this process
    ],
)
def test_another_s_plan_is_refused(text):
    problem = load(text.replace("OWN", str(os.getpid())))
    assert problem.startswith(f"the environment variable {PLAN_VARIABLE}: cannot be read (")
    assert len(problem.splitlines()) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "0", "{}", '{"layout": 3}'])
def test_a_damaged_plan_is_refused(content):
    with tempfile.TemporaryFile() as file:
        file.write(content.encode())
        file.flush()
        problem = load(f"{os.getpid()} {file.fileno()}", file.fileno())
    assert problem.startswith(f"the environment variable {PLAN_VARIABLE}: cannot be read (")
