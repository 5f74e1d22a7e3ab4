"""Signals and lost consoles while the real scripts train: no finished step is lost."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from typing import Any

import pytest

from megakit.runtime.signals import StopRequest
from megakit.training.stopping import StopSignals
from tests.faults.harness import MARK, Training, leftover_processes
from tests.left_behind import list_checkpoints, read_whole
from tests.scripts import REPOSITORY, environment

ENDLESS = ("--max-steps", 1_000_000, "--save-interval", 1_000_000)
STATUS: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143}


def saved_step(training: Training) -> int:
    """The step of the only checkpoint; it is complete."""
    assert leftover_processes(training.mark) == []
    (checkpoint,) = list_checkpoints(training.checkpoints)
    step: int = read_whole(checkpoint)["step"]
    return step


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, ("--devices", 2, "--num-workers", 1)),
        pytest.param(signal.SIGINT, ("--num-workers", 2), marks=pytest.mark.long),
    ],
)
def test_a_signal_to_every_process(
    tmp_path: Any, script: str, number: int, options: tuple[object, ...]
) -> None:
    """Ranks and loader workers receive it as well as the launcher, as Ctrl-C does it."""
    training = Training(tmp_path, script, options)
    process = training.process(None, *ENDLESS)
    training.wait_for_steps(process)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == STATUS[number], err
    told = err.partition("Stopping: a checkpoint will be saved.")[2]  # at once, and by one rank
    assert f"Stopped after step {saved_step(training)};" in told
    assert "Stopping" not in told
    assert "Traceback" not in err
    assert out == ""


def test_a_signal_while_one_is_received_is_told_once() -> None:
    """The launcher forwards the signal that its ranks receive from the terminal as well."""

    class Interrupted(StopRequest):
        def is_repeated(self, number: int) -> bool:
            if not self.received:
                self.is_repeated = super().is_repeated  # type: ignore[method-assign]
                signal.raise_signal(number)
            return super().is_repeated(number)

    lines: list[str] = []
    with StopSignals(lines.append) as signals:
        signals.request = Interrupted()
        signal.raise_signal(signal.SIGTERM)
    assert signals.request.received == signal.SIGTERM
    assert len(lines) == 1, lines


@pytest.mark.long
def test_a_terminal_that_hangs_up(tmp_path: Any) -> None:
    """SIGHUP comes, and every write to the terminal fails from then on."""
    training = Training(tmp_path)
    arguments = ("--dataset", "digits", "--output-dir", str(tmp_path), "--accelerator", "cpu")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, REPOSITORY / "mnist/tutorial.py", *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(TERM="xterm", **{MARK: training.mark}),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(follower)
    training.wait_for_steps(process)
    os.close(leader)
    assert process.wait(timeout=120) == 129
    log = (training.path / "log.txt").read_text()
    assert f"Stopped after step {saved_step(training)};" in log
