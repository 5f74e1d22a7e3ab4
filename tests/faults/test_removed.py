"""The folder of a run that trains is removed, or another run takes its place."""

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import BEFORE_STEP, Fault, Training
from tests.scripts import Result, read_csv

pytestmark = pytest.mark.long


def start_and_hold(training: Training, step: int) -> Any:
    """Starts a run, which stops itself before a step until it gets SIGCONT."""
    process = training.process(Fault(BEFORE_STEP, step, name="SIGSTOP"))
    deadline = time.monotonic() + 120
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def go_on(process: Any) -> Result:
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=120)
    return Result(process.returncode, out, err, 0.0)


def test_a_removed_folder_ends_the_run_with_the_truth(tmp_path: Path) -> None:
    training = Training(tmp_path)
    process = start_and_hold(training, 12)
    shutil.rmtree(training.path)
    ended = go_on(process)
    assert (ended.status, ended.out) == (1, "")
    assert f"{training.path} was removed or renamed while this run was writing to it" in ended.err
    assert "untouched" not in ended.err
    assert "Traceback" not in ended.err
    assert not training.path.exists()
    assert training.left_behind() == []


def test_a_run_never_writes_into_another_runs_folder(
    tmp_path: Path, never_stopped: dict[str, Any]
) -> None:
    first, second = Training(tmp_path), Training(tmp_path)
    process = start_and_hold(first, 12)
    shutil.rmtree(first.path)
    other = start_and_hold(second, 25)
    ended = go_on(process)
    assert ended.status == 1
    assert f"{first.path} was replaced by another run's" in ended.err
    assert "Traceback" not in ended.err
    assert go_on(other).status == 0
    steps = [row["step"] for row in read_csv(second.path / "metrics.csv")]
    assert steps == sorted(set(steps), key=int)
    assert second.result() == never_stopped
