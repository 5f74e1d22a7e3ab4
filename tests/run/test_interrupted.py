"""A set-up that is interrupted or killed, and the next one."""

import hashlib
import os
import random
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tests.run.harness import (
    bare_environment,
    holds,
    set_up,
    start,
    write_program,
    write_wheel,
)


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


@pytest.mark.long
def test_a_set_up_killed_at_random_moments_works_the_next_time(project):
    """Ten times, at moments spread over the time that a whole set-up takes."""
    began = time.monotonic()
    set_up(project)
    takes = time.monotonic() - began
    for part in range(10):
        subprocess.run(["rm", "-r", project / ".venv"], check=True)
        started = begin(project)
        time.sleep(takes * (part + random.random()) / 10)
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
        set_up(project)
        assert holds(project, "import alpha; print(alpha.version)") == "1.0\n"


def test_an_update_that_is_killed_does_not_count_as_set_up(project):
    """Neither for the new lock, nor for the old one: some packages may be new already."""
    set_up(project)
    lock, uv = project / "requirements.lock", project / ".venv/.uv/bin/uv"
    old, real = lock.read_text(), uv.read_text()
    lock.write_text(old + write_wheel(project / "wheels", "gamma", "1.0"))
    (packages,) = project.glob(".venv/lib/python3*/site-packages")
    write_program(uv, f'touch "{packages}/half"; kill -KILL $PPID')
    killed = start(project, "predict")
    assert killed.returncode == -signal.SIGKILL
    lock.write_text(old)
    uv.write_text(real)
    again = start(project, "setup", "--wheels", "wheels")
    assert again.returncode == 0, again.stderr
    assert "Installing requirements.lock" in again.stderr
    assert not (packages / "half").exists()


def test_an_update_that_fails_in_the_middle_does_not_count_as_set_up(project):
    """As on a disk that is full: uv has changed some packages already."""
    set_up(project)
    lock, uv = project / "requirements.lock", project / ".venv/.uv/bin/uv"
    real = uv.read_text()
    (packages,) = project.glob(".venv/lib/python3*/site-packages")
    write_program(uv, f'touch "{packages}/half"; exit 2')
    old = lock.read_text()
    lock.write_text(old + write_wheel(project / "wheels", "gamma", "1.0"))
    assert start(project, "predict").returncode == 1
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


SLOW_BUILD = """
import os, time
from pathlib import Path

def build_wheel(*args, **options):
    Path({mark!r}).write_text(str(os.getpid()))
    time.sleep(5)

prepare_metadata_for_build_wheel = build_wheel
"""


def runs(process):
    """Whether a process runs, and does not just wait for its parent process to ask for its end."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
    ],
)
def test_a_set_up_that_is_ended_takes_its_installer_with_it(project, tmp_path, number, status):
    """The signal comes to `run` alone, while uv waits for the build of a package.

    That build may go on for its second; the next start waits until it has ended.
    """
    mark = tmp_path / "build"
    source = tmp_path / "gamma-1.0"
    source.mkdir()
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: gamma\nVersion: 1.0\n")
    (source / "slow.py").write_text(SLOW_BUILD.format(mark=str(mark)))
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "slow"\nbackend-path = ["."]\n'
    )
    archive = project / "wheels/gamma-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(source, "gamma-1.0")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with (project / "requirements.lock").open("a") as lock:
        lock.write(f"gamma==1.0 \\\n    --hash=sha256:{digest}\n")

    started = half_set_up(project)
    deadline = time.monotonic() + 120
    while not (mark.exists() and mark.read_text()):
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    build = Path(f"/proc/{mark.read_text()}")
    installer = Path(f"/proc/{build.joinpath('stat').read_text().split()[3]}")
    assert b"uv" in (installer / "cmdline").read_bytes()
    deadline = time.monotonic() + 60
    started.send_signal(number)
    _, told = started.communicate(timeout=60)
    assert started.returncode == status
    while runs(installer):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number != signal.SIGKILL:
        assert told.splitlines()[-1] == "Interrupted. The same command resumes the set-up."
