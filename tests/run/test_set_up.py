"""The set-up of .venv from the locks."""

import os
import subprocess
import time

import pytest

from tests.run.harness import (
    BASE_PYTHON,
    bare_environment,
    holds,
    lacks,
    set_up,
    start,
    write_program,
    write_wheel,
)

# ---- What is refused ---------------------------------------------------------------------------


def test_too_little_room_is_refused_with_value_rule_and_remedy(project):
    write_program(project.parent / "bin/df", "echo Avail; echo 3GB")
    done = start(project, "setup")
    assert done.returncode == 2
    assert "3 GB free" in done.stderr
    assert "needs 6 GB" in done.stderr
    assert "VENV=" in done.stderr
    assert not (project / ".venv").exists()


def test_a_folder_that_is_no_virtual_environment_is_never_emptied(project):
    photos = project / "photos"
    photos.mkdir()
    (photos / "cat.png").touch()
    done = start(project, "setup", VENV="photos")
    assert done.returncode == 2
    assert "photos was not made by ./run" in done.stderr
    assert [file.name for file in photos.iterdir()] == ["cat.png"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("run/venv", "run/venv can't be written"),
        (".venv", "locks/notebook.lock is missing"),
    ],
)
def test_what_cannot_be_set_up_is_refused_and_leaves_nothing(project, place, reason):
    if "missing" not in reason:
        (project / "locks/notebook.lock").touch()
    before = sorted(project.rglob("*"))
    done = start(project, "notebook", VENV=place)
    assert done.returncode == 2
    assert done.stderr.startswith(f"run: {project}/{reason}")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(project.rglob("*")) == before


# ---- Setting up --------------------------------------------------------------------------------


def test_set_up_once_with_a_python_on_the_path_then_runs_at_once_from_any_folder(project, tmp_path):
    write_program(project.parent / "bin/python", "exit 127")  # it does not run
    (project.parent / "bin/python3").symlink_to(BASE_PYTHON)
    # What clusters' modules and NVIDIA's images set must not reach pip or uv.
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("alpha==3.0\nuv==3.0\n")
    theirs = {"PIP_CONSTRAINT": str(constraint), "UV_CONSTRAINT": str(constraint), "PIP_USER": "1"}
    set_up(project, python=None, **theirs)
    assert os.path.realpath(project / ".venv/bin/python") == BASE_PYTHON

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
    entry = write_wheel(wheels, "gamma", "1.0")
    lock.write_text(lock.read_text() + entry)
    set_up(project, "dev")
    (project / ".venv/kept").touch()
    (packages,) = project.glob(".venv/lib/python3*/site-packages")
    (packages / "mine.py").touch()

    newer = write_wheel(wheels, "alpha", "2.0")
    lock.write_text(newer)
    (project / "locks/dev.lock").write_text(write_wheel(wheels, "beta", "2.0"))
    set_up(project)
    assert holds(project, "import alpha, beta; print(alpha.version, beta.version)") == "2.0 2.0\n"
    assert lacks(project, "gamma")
    assert (project / ".venv/kept").exists()
    assert (packages / "mine.py").exists()


def test_a_group_is_set_up_when_it_is_first_needed(project):
    messages = set_up(project)
    assert "Installing requirements.lock in" in messages
    assert lacks(project, "beta")
    done = start(project, "setup", "dev")  # without the wheels: the tutorial stays as it was
    assert done.returncode == 1
    assert "set-up stopped" in done.stderr
    done = start(project, "predict", python=None)
    assert (done.returncode, done.stderr) == (0, "")

    messages = set_up(project, "dev")
    assert messages.count("Installing ") == 1
    assert "locks/dev.lock" in messages
    assert holds(project, "import beta; print(beta.version)") == "1.0\n"
    assert set_up(project, "dev") == f"{project}/.venv is set up.\n"


def test_a_virtual_environment_that_somebody_made_is_filled_and_never_emptied(project):
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", project / ".venv"], check=True)
    (project / ".venv/mine").touch()
    set_up(project)
    assert holds(project, "import alpha; print(alpha.version)") == "1.0\n"
    (project / ".venv/.locks/unfinished").touch()  # an installation was killed
    set_up(project)
    assert not (project / ".venv/.locks/unfinished").exists()
    asked = write_program(project.parent / "other", "echo Python 3.13.1")
    if "3.13" in BASE_PYTHON:
        write_program(asked, "echo Python 3.12.1")
    refused = start(project, "predict", python=asked)
    assert refused.returncode == 2
    assert "was made by somebody else, for another Python" in refused.stderr
    assert (project / ".venv/mine").exists()


def test_a_folder_of_wheels_holds_all_that_set_up_needs(project):
    """It is filled where there is a network, and carried to where there is none."""
    wheels = (project / "wheels").rename(project / "index")
    have = {"UV_FIND_LINKS": str(wheels), "PIP_FIND_LINKS": wheels.as_uri()}
    set_up(project, "build", **have)
    (packages,) = project.glob(".venv/lib/python3*/site-packages")
    (packages / "pip").symlink_to(pip_of(BASE_PYTHON))  # as if it came from locks/build.lock
    done = start(project, "setup", "--download", "to take along", **have)
    assert done.returncode == 0, done.stderr
    names = sorted(file.name.split("-")[0] for file in (project / "to take along").iterdir())
    assert names == ["alpha", "beta", "uv"]

    subprocess.run(["rm", "-r", project / ".venv"], check=True)
    done = start(project, "setup", "--wheels", "to take along", UV_FIND_LINKS="")
    assert done.returncode == 0, done.stderr
    assert holds(project, "import alpha, beta; print(beta.version)") == "1.0\n"


def pip_of(python):
    code = "import os, pip; print(os.path.dirname(pip.__file__))"
    command = [python, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.long
def test_two_at_once_set_up_once(project):
    command = [project / "run", "setup", "--wheels", "wheels"]
    options = {"cwd": project, "env": bare_environment(project), "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, text=True, **options) for _ in range(2)]
    messages = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], messages
    assert sum("waiting for it" in message for message in messages) == 1
    assert sum("Installing requirements.lock" in message for message in messages) == 1
