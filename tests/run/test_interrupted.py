"""A set-up that is interrupted or killed, and the next one."""

import hashlib
import os
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tests.run.harness import (
    as_if_set_up,
    bare_environment,
    holds,
    set_up,
    start,
    write_wheel,
)


def half_set_up(project):
    """A set-up that has begun to fill .venv, in a process group of its own."""
    started = subprocess.Popen(
        [project / "run", "setup", "--wheels", "wheels"],
        cwd=project,
        env=bare_environment(project),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (project / ".venv/pyvenv.cfg").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return started


def test_an_interrupted_set_up_is_made_anew(project):
    venv = project / ".venv"
    killed = half_set_up(project)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (venv / "half-unpacked").touch()

    set_up(project)
    assert not (venv / "half-unpacked").exists()
    assert holds(project, "import alpha; print(alpha.version)") == "1.0\n"

    (venv / "bin/python").unlink()  # or its Python was taken away
    done = start(project, "predict")
    assert done.returncode == 1  # it tries, but not without the wheels
    assert "setup.log" in done.stderr
    assert not (venv / ".setup-done").exists()


def test_an_update_that_fails_does_not_count_as_set_up(project):
    """Neither for the new lock, nor for the old one: some packages may be new already."""
    as_if_set_up(project, 'case "$*" in *" pip install "*) exit 1 ;; *model*) echo ran ;; esac')
    for name in ("pyvenv.cfg", ".setup-lock"):
        (project / ".venv" / name).touch()
    lock = project / "requirements.lock"
    old = lock.read_text()
    new = old + write_wheel(project / "wheels", "beta", "1.0")
    for text, is_complete in ((new, True), (new, False), (old, False)):
        lock.write_text(text)
        done = start(project, "predict", python=None)
        assert done.returncode != 0
        assert done.stdout == ""
        assert ("up to date" in done.stderr) == is_complete  # otherwise it is made anew


def test_ctrl_c_during_set_up_is_no_failure(project):
    started = half_set_up(project)
    os.killpg(started.pid, signal.SIGINT)  # the terminal sends it to all of them
    _, told = started.communicate(timeout=60)
    assert started.returncode == 130
    assert told.splitlines()[-1] == "Interrupted. The same command resumes the set-up."
    assert "setup.log" not in told


SLOW_BUILD = """
import os, time
from pathlib import Path

def build_wheel(*args, **options):
    Path({mark!r}).write_text(str(os.getpid()))
    time.sleep(60)

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
    """The signal comes to `run` alone, while pip waits for the build of a package."""
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
    assert b"pip" in (installer / "cmdline").read_bytes()
    deadline = time.monotonic() + 60
    started.send_signal(number)
    _, told = started.communicate(timeout=60)
    assert started.returncode == status
    while any(map(runs, (installer, build))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number != signal.SIGKILL:
        assert told.splitlines()[-1] == "Interrupted. The same command resumes the set-up."
