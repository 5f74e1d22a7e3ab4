"""The ranks that our launcher starts, what a signal does, and how the job ends with its ranks."""

import os
import signal
from pathlib import Path

import pytest

from megakit.runtime.signals import STOP_SIGNALS, exit_status
from tests.megakit.job.jobs import alive, job, wait_until


def test_every_rank_knows_its_place(tmp_path: Path) -> None:
    with job(tmp_path, 3, "0", OMP_NUM_THREADS=None) as started:
        ranks = started.ranks()
        assert started.end() == (0, "")
    for number, rank in enumerate(ranks):
        assert rank["argv"] == started.arguments
        expected = {
            **{"RANK": str(number), "LOCAL_RANK": str(number)},
            **{"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0"},
            **{"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
        }
        assert expected.items() <= rank["environ"].items()
    (port,) = {rank["environ"]["MASTER_PORT"] for rank in ranks}
    assert 1024 <= int(port) < 65536


@pytest.mark.parametrize(
    ("tasks", "grace", "status", "told"),
    [
        (("sleep", "3", "sleep"), 20.0, 3, "Rank 1 (process PID) ended with status 3"),
        (("sleep", "killed"), 20.0, 1, "Rank 1 (process PID) was killed by SIGKILL"),
        (("sleep", "2"), 20.0, 2, ""),  # a rank that refuses has said why
        (("stubborn", "1"), 1.0, 1, "Rank 1 (process PID) ended with status 1"),
        (("sleep", "143"), 0.2, 143, ""),
    ],
)
def test_the_end_of_one_rank_ends_the_others(
    tasks: tuple[str, ...], grace: float, status: int, told: str, tmp_path: Path
) -> None:
    with job(tmp_path, len(tasks), *tasks, grace=grace) as started:
        ranks = started.ranks()
        ended, err = started.end()
        assert (ended, alive(ranks)) == (status, [])
    assert err.count("\n") == bool(told)
    assert err.startswith(told.replace("PID", str(ranks[1]["pid"])))


def test_a_parent_process_that_ignores_the_ends_of_its_children(tmp_path: Path) -> None:
    """Their exit statuses would be lost, and a failed job would be a success."""
    with job(tmp_path, 2, "3", ignores_children=True) as started:
        assert started.end()[0] == 3


def test_a_stopped_rank_gives_another_the_time_to_save(tmp_path: Path) -> None:
    with job(tmp_path, 2, "143", "late") as started:
        assert started.end() == (143, "")
        assert (tmp_path / "late").exists()
        assert started.signals() == {}


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("to_all", [False, True])
def test_signals_are_forwarded_once(tmp_path: Path, number: signal.Signals, to_all: bool) -> None:
    """To the launcher alone, as `kill` sends it; or to all processes, as a terminal does."""
    with job(tmp_path, 2, "sleep") as started:
        ranks = started.ranks()
        if to_all:
            os.killpg(started.process.pid, number)
        else:
            started.process.send_signal(number)
        assert started.end() == (exit_status(number), "")
        assert alive(ranks) == []
        assert started.signals() == {"signal-0": number.name, "signal-1": number.name}


def test_a_second_signal_kills_ranks_that_go_on(tmp_path: Path) -> None:
    with job(tmp_path, 2, "goes on") as started:
        ranks = started.ranks()
        started.process.send_signal(signal.SIGTERM)
        wait_until(lambda: len(started.signals()) == 2)
        assert len(alive(ranks)) == 2
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == (143, "")
        assert alive(ranks) == []


def test_a_signal_before_ranks_are_ready_for_it(tmp_path: Path) -> None:
    """While they still import, the signal itself ends them: stopped as asked, not failed."""
    with job(tmp_path, 2, "bare") as started:
        ranks = started.ranks()
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == (143, "")
        assert alive(ranks) == []


def test_a_rank_that_is_killed_while_it_stops_is_a_failure(tmp_path: Path) -> None:
    """By a lack of memory, for example: nothing was saved."""
    with job(tmp_path, 1, "dies") as started:
        started.ranks()
        started.process.send_signal(signal.SIGTERM)
        status, err = started.end()
        assert (status, "was killed by SIGKILL" in err) == (1, True)


def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    with job(tmp_path, 3, "stubborn") as started:
        ranks = started.ranks()
        assert len(alive(ranks)) == 3
        started.process.kill()
        started.end()
        wait_until(lambda: alive(ranks) == [], seconds=5)
