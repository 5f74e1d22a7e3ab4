"""The environment of a job: what is read, what is refused, and what is harmless."""

import os
import re

import pytest

from megakit.errors import UserError
from megakit.job.cluster import Cluster

TORCHRUN = {
    **{"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
}
SRUN = {
    **{"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_LOCALID": "1"},
    **{"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"},
}


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """No job around this test, and none after it."""
    for name in list(os.environ):
        if re.search("^SLURM_|^TORCHELASTIC_|^MASTER_|RANK|WORLD_SIZE", name):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def read(variables, **changes):
    """The cluster; a change to None leaves a variable out."""
    for name, value in {**variables, **changes}.items():
        if value is not None:
            os.environ[name] = value
    return Cluster.from_environment()


def refused(variables, **changes):
    with pytest.raises(UserError) as caught:
        read(variables, **changes)
    for problem in caught.value.problems:
        assert re.search(r"unset|Start the script by", problem)
    return caught.value.problems


def test_alone():
    assert read({}) == Cluster(None, rank=0, devices=1, num_nodes=1)


class TestTorchrun:
    def test_read(self):
        cluster = read(TORCHRUN)
        assert (cluster.launcher, cluster.rank, cluster.local_rank) == ("torchrun", 5, 1)
        assert (cluster.devices, cluster.num_nodes, cluster.num_surplus) == (4, 2, 0)
        assert (cluster.address, cluster.ports, cluster.name) == ("node1", (29500,), "-")
        assert read(TORCHRUN, TORCHELASTIC_RUN_ID="this one").name == "this one"

    def test_within_srun_counts(self):
        assert read(TORCHRUN | SRUN | {"SLURM_NTASKS": "nonsense"}).launcher == "torchrun"

    def test_half_of_them(self):
        (problem,) = refused({"RANK": "0", "WORLD_SIZE": "2"})
        assert problem.startswith("RANK=0 WORLD_SIZE=2: torchrun also sets LOCAL_RANK, ")
        assert problem.endswith("for a single process, unset RANK WORLD_SIZE.")

    @pytest.mark.parametrize(
        ("name", "value", "rule"),
        [
            *(("LOCAL_WORLD_SIZE", value, "from 1 to 8") for value in ("abc", "9")),
            ("WORLD_SIZE", "0", "of at least 1"),
            ("RANK", "8", "from 0 to 7, as WORLD_SIZE is 8"),
            ("MASTER_ADDR", "a b", "machine of rank 0"),
        ],
    )
    def test_senseless_values(self, name, value, rule):
        (problem,) = refused(TORCHRUN, **{name: value})
        assert problem.startswith(f"{name}=")
        assert rule in problem


class TestSrun:
    def test_read(self):
        cluster = read(SRUN, SLURM_GPUS_ON_NODE="2")
        assert (cluster.launcher, cluster.rank, cluster.local_rank) == ("srun", 3, 1)
        assert (cluster.devices, cluster.num_nodes, cluster.node) == (2, 2, 1)
        assert cluster.num_gpus == 2
        assert (cluster.address, cluster.name) == ("127.0.0.1", "4711.0")
        assert cluster.torchrun_variables() == {
            **{"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "127.0.0.1"},
            **{"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
        }

    def test_a_batch_script_that_asked_for_no_number_of_tasks(self):
        cluster = read({"SLURM_PROCID": "0"})
        assert (cluster.devices, cluster.num_nodes, cluster.num_processes) == (1, 1, 1)

    def test_the_sizes_of_the_step_and_of_unequal_machines(self):
        cluster = read(SRUN, SLURM_STEP_NUM_TASKS="6", SLURM_STEP_NUM_NODES="1")
        assert (cluster.devices, cluster.num_nodes, cluster.num_surplus) == (6, 1, 0)
        cluster = read(SRUN, SLURM_STEP_NUM_TASKS="5", SLURM_STEP_NUM_NODES="2")
        assert (cluster.devices, cluster.num_surplus, cluster.num_processes) == (2, 1, 5)

    def test_rank_0_is_on_the_first_machine(self):
        """Of the step, and the user's address comes before it."""
        assert read(SRUN, SLURM_JOB_NODELIST="a1,b2").address == "a1"
        assert read(SRUN, SLURM_JOB_NODELIST="gpu[03-05,09]").address == "gpu03"
        assert read(SRUN, SLURM_STEP_NODELIST="step[1-2]").address == "step1"
        assert read(SRUN, MASTER_ADDR="mine").address == "mine"

    def test_a_port_of_the_user_s_is_the_only_one(self):
        assert read(SRUN, MASTER_PORT="4000").ports == (4000,)

    def test_a_shell_or_an_allocation_without_a_step_is_no_job(self):
        assert read(SRUN, SLURM_PROCID=None) == Cluster()
        assert read(SRUN, SLURM_JOB_NAME="interactive") == Cluster()
        step = read(SRUN, SLURM_JOB_NAME="interactive", SLURM_STEP_NUM_TASKS="4")
        assert (step.launcher, step.num_processes) == ("srun", 4)


@pytest.mark.parametrize(
    "variables",
    [
        {"MASTER_ADDR": "node17", "NODE_RANK": "x"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ],
)
def test_leftovers_of_a_job_are_harmless_and_removed(variables):
    """What an earlier job, or a user's profile, left in the environment of a process alone."""
    cluster = read(variables)
    assert cluster == Cluster()
    cluster.correct_environment()
    assert not variables.keys() & {*os.environ}


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN])
def test_a_job_keeps_its_variables(variables):
    read(variables).correct_environment()
    changed = {name for name, value in variables.items() if os.environ.get(name) != value}
    assert changed == ({"SLURM_JOB_NAME"} if variables is SRUN else set())
    # Lightning does not requeue the job then.
    assert os.environ.get("SLURM_JOB_NAME", "interactive") == "interactive"
