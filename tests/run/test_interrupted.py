"""A set-up that is interrupted or killed, and the next one."""

import os
import signal
import subprocess
import time

import pytest

from tests.run.harness import bare_environment, holds, set_up, start, write_program, write_wheel


def begin(project):
    """A set-up in a process group of its own."""
    return subprocess.Popen(
        [project / "run", "setup", "--wheels", "wheels"],
        cwd=project,
        env=bare_environment(project),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def half_set_up(project):
    """A set-up that has begun to fill .venv."""
    started = begin(project)
    deadline = time.monotonic() + 60
    while not (project / ".venv/pyvenv.cfg").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return started


def test_an_interrupted_set_up_is_made_anew(project):
    venv = project / ".venv"
    killed = half_set_up(project)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (venv / ".locks").mkdir(exist_ok=True)
    (venv / ".locks/unfinished").touch()  # should it have come too early
    (venv / "half-unpacked").touch()

    set_up(project)
    assert not (venv / "half-unpacked").exists()
    assert holds(project, "import alpha; print(alpha.version)") == "1.0\n"

    (venv / "bin/python").unlink()  # or its Python was taken away
    done = start(project, "predict", UV_CACHE_DIR=str(project / "empty"))
    assert done.returncode == 1  # it tries, but not without the wheels
    assert "set-up stopped" in done.stderr
    set_up(project)


@pytest.mark.parametrize(("end", "status"), [("kill -KILL $PPID", -signal.SIGKILL), ("exit 2", 1)])
def test_an_update_that_ends_in_the_middle_does_not_count_as_set_up(project, end, status):
    """Killed, or as on a full disk; nor for the old lock: some packages may be new already."""
    set_up(project)
    lock, uv = project / "requirements.lock", project / ".venv/.uv/bin/uv"
    old, real = lock.read_text(), uv.read_text()
    lock.write_text(old + write_wheel(project / "wheels", "gamma", "1.0"))
    (packages,) = project.glob(".venv/lib/python3*/site-packages")
    write_program(uv, f'touch "{packages}/half"; {end}')
    assert start(project, "predict").returncode == status
    lock.write_text(old)
    uv.write_text(real)
    assert "Installing requirements.lock" in set_up(project)
    assert not (packages / "half").exists()


def test_ctrl_c_during_set_up_is_no_failure(project):
    started = half_set_up(project)
    os.killpg(started.pid, signal.SIGINT)  # the terminal sends it to all of them
    _, told = started.communicate(timeout=60)
    assert started.returncode == 130
    assert told.splitlines()[-1] == "Interrupted. The same command resumes the set-up."
    assert "set-up stopped" not in told
