"""How a command line becomes options, and the environment of a job a place in it.

tests/test_refusals.py has the options that are refused.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from unittest import mock

import pytest

from megakit.errors import UserError
from megakit.job import Range, Size, TrainingOptions
from megakit.job.cluster import TORCHRUN as NAMES, Cluster, read_cluster
from megakit.job.command_line import parse_options
from megakit.job.option_types import broken_rules, given_of, use_sizes_of


@dataclass(kw_only=True)
class Options(TrainingOptions):
    """Bake a cake, with 100% butter."""

    max_steps: int = 7
    share: Annotated[float | None, Range(least=0)] = None
    """Share of the butter: 50% at least."""

    kind: Literal["plum", "pear"] = "plum"
    folder: Path = Path("kitchen")


def test_values_of_every_type() -> None:
    given = ["--max-steps", "9", "--share=1e-3", "--kind", "pear", "--folder", "a b", "--fresh"]
    options = parse_options(Options, given)
    assert (options.max_steps, options.share, options.kind) == (9, 0.001, "pear")
    assert (options.folder, options.fresh, options.verbose) == (Path("a b"), True, False)
    assert parse_options(Options, []) == Options()


# ---- Sizes of the model ----

START = Path("step=7")


@dataclass(kw_only=True)
class Sizes:
    width: Annotated[int, Size(least=1)] = 8
    depth: Annotated[int, Size(least=1)] | None = None
    steps: Annotated[int, Range(least=1)] = 2


def test_sizes_that_are_not_given_are_those_of_the_start_checkpoint() -> None:
    for options in (parse_options(Sizes, ["--depth", "3"]), Sizes(depth=3)):
        assert given_of(options) == {"depth"}
        use_sizes_of(options, {"width": 9, "depth": 3, "steps": 5}, START)
        assert options == Sizes(width=9, depth=3)
        use_sizes_of(options, {}, START)  # of a model without these sizes
        assert options == Sizes(width=9, depth=3)


def test_given_sizes_have_to_be_those_of_the_start_checkpoint() -> None:
    options = parse_options(Sizes, ["--width", "8"])  # also the default
    with pytest.raises(UserError, match=r"^--width 8: the model of step=7 has 9, "):
        use_sizes_of(options, {"width": 9}, START)


def test_rules_for_options_that_are_built_in_python() -> None:
    rules = [rule.partition(": has to be ")[2] for rule in broken_rules(Options(lr=0, share=-1))]
    assert sorted(rules) == ["above 0.", "at least 0."]
    assert broken_rules(Sizes(depth=0)) == ["--depth 0: has to be at least 1."]


# ---- The environment ----


TORCHRUN = dict(zip(NAMES, ("5", "8", "1", "4", "node1", "29500"), strict=True))
SRUN = {
    **{"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "4"},
    **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NAME": "train"},
    **{"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-05,09]"},
}


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    """No job around this test, and none after it."""
    with mock.patch.dict(os.environ):
        for name in [*os.environ]:
            if re.search("^SLURM_|^TORCHELASTIC_|^MASTER_|^CUDA_|RANK|WORLD_SIZE", name):
                del os.environ[name]
        yield


def read(*variables: dict[str, str]) -> Cluster:
    for some in variables:
        os.environ.update(some)
    return read_cluster()


def test_srun_and_what_it_sets() -> None:
    assert read(SRUN) == Cluster("srun", 3, devices=2, num_nodes=2)
    assert [os.environ[name] for name in NAMES] == ["3", "4", "1", "2", "gpu03", "19711"]
    assert os.environ["SLURM_JOB_NAME"] == "interactive"  # Lightning does not requeue the job
    assert read(TORCHRUN, SRUN) == Cluster("torchrun", 5, devices=4, num_nodes=2)
    read(SRUN, {"MASTER_ADDR": "mine", "MASTER_PORT": "4000"})
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("mine", "4000")


@pytest.mark.parametrize(
    "variables",
    [
        {"MASTER_ADDR": "node17", "NODE_RANK": "x", "LOCAL_RANK": "0"},
        # in a batch file, and in an interactive shell of srun or salloc
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "MASTER_PORT": "1"},
        SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "MASTER_PORT": "1"},
    ],
)
def test_a_single_process_loses_the_leftovers_of_a_job(variables: dict[str, str]) -> None:
    assert read(variables) == Cluster()
    assert not {*NAMES, "NODE_RANK"} & {*os.environ}
    assert os.environ.get("SLURM_JOB_NAME") in (None, "interactive")


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 WORLD_SIZE=2 LOCAL_RANK= "),
        (TORCHRUN | {"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR= "),
        (SRUN | {"SLURM_PROCID": "4"}, "RANK=4 WORLD_SIZE=4"),
        (TORCHRUN | {"WORLD_SIZE": "7"}, "WORLD_SIZE=7"),  # machines with unequal numbers
        (SRUN | {"SLURM_STEP_NUM_TASKS": "3"}, "WORLD_SIZE=3"),
    ],
)
def test_damaged_variables_are_refused(variables: dict[str, str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        read(variables)
    (problem,) = caught.value.problems
    assert told in problem
    assert re.search(r"all of these variables.* unset ", problem)
