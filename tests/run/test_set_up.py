"""The set-up of .venv from the lock."""

import os
import re
import subprocess
import time

import pytest

from tests.run.harness import (
    BASE_PYTHON,
    bare_environment,
    holds,
    lent,
    set_up,
    start,
    write_program,
    write_wheel,
)
from tests.scripts import REPOSITORY

# ---- Before it fills the disk ------------------------------------------------------------------


def test_too_little_room_is_refused_with_value_rule_and_remedy(project):
    write_program(project.parent / "bin/df", "echo Avail; echo 3GB")
    done = start(project, "setup")
    assert done.returncode == 2
    assert "3 GB free" in done.stderr
    assert "needs 12 GB" in done.stderr
    assert "VENV=" in done.stderr
    assert not (project / ".venv").exists()


def test_a_folder_that_is_no_virtual_environment_is_never_emptied(project):
    photos = project / "photos"
    photos.mkdir()
    (photos / "cat.png").touch()
    done = start(project, "setup", "--wheels", "wheels", VENV="photos")
    assert done.returncode == 2
    assert "no virtual environment" in done.stderr
    assert [file.name for file in photos.iterdir()] == ["cat.png"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [("run/venv", "run/venv can't be written"), (".venv", "requirements.lock is missing")],
)
def test_what_cannot_be_set_up_is_refused_and_leaves_nothing(project, place, reason):
    if "lock" in reason:
        (project / "requirements.lock").unlink()
    before = sorted(project.rglob("*"))
    done = start(project, "predict", VENV=place)
    assert done.returncode == 2
    assert done.stderr.startswith(f"run: {project}/{reason}")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(project.rglob("*")) == before


# ---- Setting up --------------------------------------------------------------------------------


def test_setuptools_is_cut_out_of_the_lock_with_its_hashes_and_no_more():
    entry = lent("lock_entry", "setuptools", text=(REPOSITORY / "requirements.lock").read_text())
    first, *hashes = entry.splitlines()
    assert first.startswith("setuptools==")
    assert hashes
    assert all(line.strip().startswith("--hash=sha256:") for line in hashes)


def test_every_line_of_the_lock_is_counted():
    text = (REPOSITORY / "requirements.lock").read_text()
    names = lent("lock_names", text=text).split()
    pins = [line for line in text.splitlines() if not line.startswith((" ", "#")) and line]
    assert names == sorted({re.split(r"\[|==", pin)[0] for pin in pins})


def test_set_up_once_with_a_python_on_the_path_then_runs_at_once_from_any_folder(project, tmp_path):
    write_program(project.parent / "bin/python3.12", "exit 127")  # it does not run
    (project.parent / "bin/python3").symlink_to(BASE_PYTHON)
    # What clusters' modules and NVIDIA's images set must not reach pip.
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("alpha==3.0\n")
    messages = set_up(project, python=None, PIP_CONSTRAINT=str(constraint), PIP_USER="1")
    assert BASE_PYTHON in messages
    assert os.path.realpath(project / ".venv/bin/python") == BASE_PYTHON
    assert not (project / ".venv/setup-tmp").exists()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    began = time.perf_counter()
    done = start(project, "predict", "--data-dir", "my data", cwd=elsewhere, python=None)
    seconds = time.perf_counter() - began
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{elsewhere}|1.0|--data-dir|my data\n"
    assert done.stderr == ""
    assert seconds < 5


def test_a_changed_lock_is_noticed_and_what_it_dropped_goes(project):
    lock = project / "requirements.lock"
    wheels = project / "wheels"
    entry = write_wheel(wheels, "beta", "1.0")
    lock.write_text(lock.read_text() + entry)
    set_up(project)
    (project / ".venv/kept").touch()

    newer = write_wheel(wheels, "alpha", "2.0")
    lock.write_text(lock.read_text().replace(entry, "").split("alpha==")[0] + newer)
    assert "up to date" in set_up(project)
    assert holds(project, "import alpha; print(alpha.version)") == "2.0\n"
    assert holds(project, "import importlib.util as u; print(u.find_spec('beta'))") == "None\n"
    assert (project / ".venv/kept").exists()


def test_a_virtual_environment_that_somebody_made_is_filled_and_not_emptied(project):
    subprocess.run([BASE_PYTHON, "-m", "venv", project / ".venv"], check=True)
    (project / ".venv/mine").touch()
    set_up(project)
    assert (project / ".venv/mine").exists()
    assert holds(project, "import alpha; print(alpha.version)") == "1.0\n"


def test_download_fills_a_folder_with_all_of_the_lock_and_nothing_else(project):
    done = start(project, "setup", "--download", "to take along", PIP_FIND_LINKS="wheels")
    assert done.returncode == 0, done.stderr
    assert not (project / ".venv").exists()
    names = sorted(file.name for file in (project / "to take along").iterdir())
    assert names == ["alpha-1.0-py3-none-any.whl", "setuptools-1.0-py3-none-any.whl"]


@pytest.mark.long
def test_altered_wheel_is_refused_and_the_next_start_recovers(project):
    wheel = project / "wheels/alpha-1.0-py3-none-any.whl"
    good = wheel.read_bytes()
    write_wheel(project / "wheels", "alpha", "1.0", requires=["something-else"])
    done = start(project, "setup", "--wheels", "wheels")
    assert done.returncode == 1
    assert "setup.log" in done.stderr
    assert "do not match the hashes" in (done.stderr.lower())
    wheel.write_bytes(good)
    set_up(project)


@pytest.mark.long
def test_two_at_once_set_up_once(project):
    command = [project / "run", "setup", "--wheels", "wheels"]
    options = {"cwd": project, "env": bare_environment(project), "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, text=True, **options) for _ in range(2)]
    messages = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], messages
    assert sum("waiting for it" in message for message in messages) == 1
    assert sum("Setting up" in message for message in messages) == 1
