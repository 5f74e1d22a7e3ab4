"""The ranks that the launcher starts, and how the job ends when a rank ends."""

import signal
import subprocess
import sys

import pytest

from tests.megakit.job.launch.jobs import alive, job, wait_until
from tests.scripts import REPOSITORY, environment


@pytest.mark.parametrize("threads", [None, "3"])
def test_every_rank_knows_its_place(tmp_path, threads):
    with job(tmp_path, 3, "0", OMP_NUM_THREADS=threads) as started:
        ranks = started.ranks()
        assert started.end() == (0, "")
    for number, rank in enumerate(ranks):
        assert rank["argv"] == started.arguments
        expected = {
            **{"RANK": str(number), "LOCAL_RANK": str(number)},
            **{"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0"},
            **{"MASTER_ADDR": "127.0.0.1", "FROM_THE_LAUNCHER": "yes"},
            "OMP_NUM_THREADS": threads or "1",  # one thread unless told otherwise
        }
        assert expected.items() <= rank["environ"].items()
    (port,) = {rank["environ"]["MASTER_PORT"] for rank in ranks}
    assert 1024 <= int(port) < 65536


def test_one_rank_fails_and_the_others_end(tmp_path):
    with job(tmp_path, 3, "sleep", "3", "sleep") as started:
        ranks = started.ranks()
        status, err = started.end()
        assert status == 3
        assert alive(ranks) == []
        assert started.signals() == {"signal-0": "SIGTERM", "signal-2": "SIGTERM"}
    (line,) = err.splitlines()
    assert "Rank 1" in line
    assert "3" in line


def test_a_killed_rank_is_a_failure_of_the_job(tmp_path):
    with job(tmp_path, 2, "sleep", "killed") as started:
        ranks = started.ranks()
        status, err = started.end()
        assert status == 1
        assert alive(ranks) == []
    killed = f"Rank 1 (process {ranks[1]['pid']}) was killed by SIGKILL"
    assert err == f"{killed}; ending the other ranks.\n"


def test_a_rank_that_is_killed_while_it_stops_is_a_failure(tmp_path):
    """By a lack of memory, for example: nothing was saved."""
    with job(tmp_path, 1, "dies") as started:
        (rank,) = started.ranks()
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == (1, f"Rank 0 (process {rank['pid']}) was killed by SIGKILL.\n")


def test_a_rank_that_refuses_its_input_has_said_so_itself(tmp_path):
    with job(tmp_path, 2, "2", "sleep") as started:
        ranks = started.ranks()
        assert started.end() == (2, "")
        assert alive(ranks) == []


def test_a_rank_that_does_not_listen_is_killed(tmp_path):
    with job(tmp_path, 2, "1", "stubborn", grace=1.0) as started:
        ranks = started.ranks()
        status, err = started.end()
        assert status == 1
        assert alive(ranks) == []
    assert "Rank 0" in err


def test_a_stopped_rank_does_not_wait_for_ever_for_another(tmp_path):
    with job(tmp_path, 2, "143", "sleep", grace=0.2) as started:
        ranks = started.ranks()
        assert started.end()[0] == 143
        assert alive(ranks) == []


def test_a_stopped_rank_gives_another_the_time_to_save(tmp_path):
    with job(tmp_path, 2, "143", "late") as started:
        assert started.end() == (143, "")
        assert (tmp_path / "late").exists()
        assert started.signals() == {}


def test_a_killed_launcher_leaves_no_rank(tmp_path):
    with job(tmp_path, 3, "stubborn") as started:
        ranks = started.ranks()
        assert len(alive(ranks)) == 3
        started.process.kill()
        started.end()
        wait_until(lambda: alive(ranks) == [], seconds=5)


AGENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
OF_AGENT = """
import time
from megakit.job.launch import end_with_torchrun
from megakit.reporting.console import Console

end_with_torchrun(Console())
print("begun", flush=True)
time.sleep(2)
print("ended by itself")
"""


def test_a_killed_agent_of_torchrun_leaves_no_rank():
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, OF_AGENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=str(REPOSITORY), RANK="3", TORCHELASTIC_RUN_ID="x"),
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == "begun\n"
    agent.kill()
    out, err = agent.communicate(timeout=60)
    assert out == ""
    assert err == f"Rank 3 ends, as torchrun's agent (process {agent.pid}) has ended.\n"
