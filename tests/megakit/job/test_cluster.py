"""The environment of a job: what is read, what is refused, and what is harmless."""

import os
import re

import pytest

from megakit.errors import UserError
from megakit.job.cluster import Cluster

MEETING_POINT = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **{"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
    **MEETING_POINT,
}
SRUN = {
    **{"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_LOCALID": "1"},
    **{"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"},
}


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """No job around this test, and none after it."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_")) or "RANK" in name:
            monkeypatch.delenv(name)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
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
        assert len(problem.splitlines()) == 1
        assert len(problem) < 400
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

    @pytest.mark.parametrize("address", ["10.0.0.1", "::1", "fe80::1%eth0", "m\u00fcnchen.de"])
    def test_addresses(self, address):
        assert read(TORCHRUN, MASTER_ADDR=address).address == address

    def test_within_srun_counts(self):
        assert read(TORCHRUN | SRUN | {"SLURM_NTASKS": "nonsense"}).launcher == "torchrun"

    @pytest.mark.parametrize("missing", sorted(TORCHRUN))
    def test_a_missing_variable(self, missing):
        """Without one of them the script trained alone, or ended with a KeyError."""
        (problem,) = refused(TORCHRUN, **{missing: None})
        assert f"torchrun also sets {missing}" in problem

    def test_half_of_them(self):
        (problem,) = refused({"RANK": "0", "WORLD_SIZE": "2"})
        assert problem.startswith("RANK=0 WORLD_SIZE=2: torchrun also sets LOCAL_RANK, ")
        assert problem.endswith("for a single process, unset RANK WORLD_SIZE.")

    @pytest.mark.parametrize(
        ("name", "value", "rule"),
        [
            *(("LOCAL_WORLD_SIZE", value, "from 1 to 8") for value in ("abc", "0", "-1", "", "9")),
            *(("WORLD_SIZE", value, "of at least 1") for value in ("0", "1e3", "9" * 5000)),
            *(("RANK", value, "from 0 to 7, as WORLD_SIZE is 8") for value in ("8", "-1", "\n")),
            *(("LOCAL_RANK", value, "from 0 to 3") for value in ("4", "1.0", "\u0663")),
            *(("MASTER_PORT", value, "from 1 to 65,535") for value in ("abc", "99999", "0", "")),
            *(("MASTER_ADDR", value, "machine of rank 0") for value in ("", "a b", "x" * 100)),
            *(("GROUP_RANK", value, "of at least 0") for value in ("", "abc")),
            ("NODE_RANK", "-1", "of at least 0"),
        ],
    )
    def test_senseless_values(self, name, value, rule):
        (problem,) = refused(TORCHRUN, **{name: value})
        assert problem.startswith(f"{name}=")
        assert rule in problem

    def test_all_problems_at_once(self):
        problems = refused(TORCHRUN, RANK="x", WORLD_SIZE="y", MASTER_PORT="z", LOCAL_RANK=None)
        named = [problem.split("=")[0] for problem in problems]
        assert named == ["RANK", "WORLD_SIZE", "RANK", "MASTER_PORT"]
        assert "torchrun also sets LOCAL_RANK" in problems[0]


class TestSrun:
    def test_read(self):
        cluster = read(SRUN)
        assert (cluster.launcher, cluster.rank, cluster.local_rank) == ("srun", 3, 1)
        assert (cluster.devices, cluster.num_nodes, cluster.node) == (2, 2, 1)
        assert (cluster.address, cluster.name) == ("127.0.0.1", "4711.0")
        assert cluster.torchrun_variables() == {
            **{"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "127.0.0.1"},
            **{"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
        }

    def test_a_batch_script_that_asked_for_no_number_of_tasks(self):
        cluster = read({"SLURM_PROCID": "0"})
        assert (cluster.devices, cluster.num_nodes, cluster.num_processes) == (1, 1, 1)

    def test_the_gpus_of_the_job_on_this_machine(self):
        assert read(SRUN).num_gpus == 0
        assert read(SRUN, SLURM_GPUS_ON_NODE="2").num_gpus == 2

    def test_the_step_s_own_sizes(self):
        cluster = read(SRUN, SLURM_STEP_NUM_TASKS="6", SLURM_STEP_NUM_NODES="1")
        assert (cluster.devices, cluster.num_nodes) == (6, 1)
        assert read(SRUN, SLURM_STEP_NUM_TASKS="", SLURM_STEP_NUM_NODES="").num_processes == 4

    def test_a_place_that_follows_from_the_rank(self):
        cluster = read(SRUN, SLURM_NTASKS="6", SLURM_PROCID="4", SLURM_LOCALID=None)
        assert (cluster.local_rank, cluster.node) == (1, 1)

    def test_more_processes_on_one_machine_than_on_another(self):
        cluster = read(SRUN, SLURM_NTASKS="5")
        assert (cluster.devices, cluster.num_surplus, cluster.num_processes) == (2, 1, 5)

    @pytest.mark.parametrize(
        ("nodes", "first"),
        [
            *(("gpu[03-05,09]", "gpu03"), ("gpu7", "gpu7"), ("a1,b2", "a1"), ("a[1,3],b2", "a1")),
            *(("a[12]", "a12"), ("10.0.0.[1-4]", "10.0.0.1")),
        ],
    )
    def test_rank_0_is_on_the_first_machine(self, nodes, first):
        assert read(SRUN, SLURM_JOB_NODELIST=nodes).address == first

    def test_the_machines_of_the_step_come_first_and_the_user_s_before_them(self):
        lists = {"SLURM_STEP_NODELIST": "step[1-2]", "SLURM_JOB_NODELIST": "job[1-4]"}
        assert read(SRUN | lists).address == "step1"
        assert read(SRUN | lists, MASTER_ADDR="mine").address == "mine"

    def test_a_port_of_the_user_s_is_the_only_one(self):
        assert read(SRUN, MASTER_PORT="4000").ports == (4000,)

    def test_ports_differ_from_step_to_step_and_job_to_job(self):
        found = [
            read(SRUN, SLURM_JOB_ID=job, SLURM_STEP_ID=step).ports
            for job in ("4711", "4712", "999999999")
            for step in ("0", "1")
        ]
        for ports in found:
            assert len(set(ports)) == len(ports) > 4
            assert all(15_000 <= port < 25_000 for port in ports)
        assert len({ports[0] for ports in found}) == len(found)

    @pytest.mark.parametrize("name", ["bash", "interactive"])
    def test_a_shell_in_an_allocation_is_no_job(self, name):
        assert read(SRUN, SLURM_JOB_NAME=name, SLURM_NTASKS="") == Cluster()

    def test_a_step_that_is_started_in_such_a_shell_is_a_job(self):
        step = read(SRUN, SLURM_JOB_NAME="interactive", SLURM_STEP_NUM_TASKS="4")
        assert (step.launcher, step.num_processes) == ("srun", 4)

    def test_an_allocation_without_a_step_is_no_job(self):
        assert read(SRUN, SLURM_PROCID=None, SLURM_NNODES="0") == Cluster()

    @pytest.mark.parametrize("value", ["", "abc", "-1", "1.5"])
    @pytest.mark.parametrize(
        "name",
        [
            *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_JOB_ID"),
            *("SLURM_NNODES", "SLURM_NODEID", "MASTER_PORT"),
        ],
    )
    def test_senseless_numbers(self, name, value):
        (problem,) = refused(SRUN, **{name: value})
        assert problem.startswith(f"{name}=")

    @pytest.mark.parametrize(
        ("name", "value", "rule"),
        [
            *(("SLURM_NNODES", "0", "from 1 to 4"), ("SLURM_NNODES", "5", "SLURM_NTASKS is 4")),
            *(("SLURM_NTASKS", "0", "at least 1"), ("SLURM_PROCID", "4", "from 0 to 3")),
            ("SLURM_JOB_NODELIST", "[", "machine of rank 0"),
        ],
    )
    def test_out_of_range(self, name, value, rule):
        (problem,) = refused(SRUN, **{name: value})
        assert problem.startswith(f"{name}=")
        assert rule in problem


class TestLeftovers:
    """What an earlier job, or a user's profile, left in the environment of a process alone."""

    @pytest.mark.parametrize(
        "variables",
        [
            *({"MASTER_ADDR": "node17"}, {"MASTER_PORT": "abc"}, {"NODE_RANK": "x"}),
            *({"RANK": "0", "WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}),
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            {"TORCHELASTIC_RUN_ID": "old", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            {"SLURM_JOB_NAME": "bash", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
            {"SLURM_NTASKS": "", "SLURM_NNODES": "0"},
        ],
    )
    def test_harmless_ones_are_accepted_and_removed(self, variables):
        before = dict(os.environ)
        cluster = read(variables)
        assert cluster == Cluster()
        cluster.correct_environment()
        assert {name: os.environ.get(name) for name in before} == before
        assert {name for name in os.environ if name not in before} <= {
            *("SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NAME")
        }

    @pytest.mark.parametrize("variables", [{"RANK": "1"}, {"WORLD_SIZE": "2"}, {"LOCAL_RANK": ""}])
    def test_those_of_a_job_are_refused(self, variables):
        refused(variables)

    @pytest.mark.parametrize("variables", [TORCHRUN, SRUN])
    def test_a_job_keeps_its_variables(self, variables):
        read(variables, NODE_RANK="0").correct_environment()
        changed = {name for name, value in variables.items() if os.environ.get(name) != value}
        assert changed == ({"SLURM_JOB_NAME"} if variables is SRUN else set())
        # Lightning neither requeues the job then, nor takes another's index for this machine's.
        assert os.environ.get("SLURM_JOB_NAME", "interactive") == "interactive"
        assert ("NODE_RANK" in os.environ) == (variables is TORCHRUN)

    def test_ranks_name_themselves_in_a_job_of_several(self):
        assert (read(TORCHRUN).rank_suffix, Cluster().rank_suffix) == (" (rank 5)", "")
