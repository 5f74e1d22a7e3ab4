"""The set-up of .venv from the locks: what is installed, refused, interrupted, carried along."""

import ctypes
import os
import signal
import subprocess
import time

from tests.run.conftest import (
    BASE_PYTHON,
    as_if_set_up,
    bare_environment,
    holds,
    lacks,
    set_up,
    start,
    write_program,
    write_wheel,
)


def test_a_folder_of_the_user_is_refused_and_left_as_it_was(project):
    (project / "photos").mkdir()
    (project / "photos/cat.png").touch()
    done = start(project, "predict", VENV="photos")
    assert done.returncode == 2
    assert done.stderr.startswith(f"run: {project}/photos was not made by ./run")
    assert [*(project / "photos").iterdir()] == [project / "photos/cat.png"]


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
    done = start(project, "predict", "--data-dir", "my data", cwd=elsewhere, python=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{elsewhere}|1.0|--data-dir|my data\n"
    assert done.stderr == ""


def test_a_changed_lock_is_noticed_and_what_is_not_of_the_lock_stays(project):
    set_up(project, "--dev")
    (packages,) = project.glob(".venv/lib/python3*/site-packages")
    (packages / "mine.py").touch()
    (project / "requirements.lock").write_text(write_wheel(project / "index", "alpha", "2.0"))
    messages = set_up(project)
    assert messages.count("Installing ") == 1
    assert holds(project, "import alpha, beta; print(alpha.version, beta.version)") == "2.0 1.0\n"
    assert (packages / "mine.py").exists()


def test_the_second_lock_is_set_up_when_it_is_first_needed(project):
    assert "Installing requirements.lock in" in set_up(project)
    assert lacks(project, "beta")
    done = start(project, "new", UV_FIND_LINKS=str(project / "index"))
    assert done.stderr == (
        f"Installing requirements.lock requirements-dev.lock in {project}/.venv.\n"
    )
    assert holds(project, "import beta; print(beta.version)") == "1.0\n"
    assert set_up(project, "--dev") == f"{project}/.venv is set up.\n"


def obey_modes():
    """Takes from root what lets it read and write every file: CAP_DAC_OVERRIDE and _READ_SEARCH."""
    PR_CAPBSET_DROP = 24
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability)


def test_a_set_up_of_another_user(project):
    """It serves this user, who cannot change it."""
    as_if_set_up(project, "echo ran")
    locks = project / ".venv/.locks"
    locks.chmod(0o555)
    assert start(project, "predict", python=None, before=obey_modes).stdout == "ran\n"
    (project / "requirements.lock").write_text("another==1\n")
    changed = start(project, "predict", python=None, before=obey_modes)
    locks.chmod(0o755)
    assert changed.returncode == 2
    assert changed.stderr.startswith(f"run: {project}/.venv can't be written; name a place that")


# ---- Interrupted -------------------------------------------------------------------------------


def interrupt(project, signal_number):
    """Ends a set-up that has begun to fill .venv."""
    started = subprocess.Popen(
        [project / "run", "setup", "--wheels", "index"],
        cwd=project,
        env=bare_environment(project),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (project / ".venv/pyvenv.cfg").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(started.pid, signal_number)  # as a terminal does
    return started, started.communicate(timeout=60)[1]


def test_a_killed_set_up_is_made_anew(project):
    interrupt(project, signal.SIGKILL)
    venv = project / ".venv"
    set_up(project)
    assert holds(project, "import alpha; print(alpha.version)") == "1.0\n"

    (venv / "bin/python").unlink()  # or its Python was taken away
    set_up(project)
    assert start(project, "predict").returncode == 0


def test_ctrl_c_during_set_up_is_no_failure(project):
    started, told = interrupt(project, signal.SIGINT)
    assert started.returncode == 130
    assert told.splitlines()[-1] == "Interrupted. The same command resumes the set-up."
    assert "set-up stopped" not in told


def test_an_update_that_is_killed_does_not_count_as_set_up(project):
    """Nor for the old lock: some packages may be new already."""
    set_up(project)
    lock, uv = project / "requirements.lock", project / ".venv/.uv/bin/uv"
    old, real = lock.read_text(), uv.read_text()
    lock.write_text(old + write_wheel(project / "index", "gamma", "1.0"))
    write_program(uv, "kill -KILL $PPID")
    assert start(project, "predict").returncode != 0
    lock.write_text(old)
    uv.write_text(real)
    assert "Installing requirements.lock" in set_up(project)


# ---- Without a network -------------------------------------------------------------------------


def test_a_folder_of_wheels_holds_all_that_set_up_needs(project):
    """It is filled where there is a network, and carried to where there is none."""
    index = project / "index"
    have = {"UV_FIND_LINKS": str(index), "PIP_FIND_LINKS": index.as_uri()}
    set_up(project, "--dev", **have)
    (packages,) = project.glob(".venv/lib/python3*/site-packages")
    (packages / "pip").symlink_to(pip_of(BASE_PYTHON))  # as if it came from requirements-dev.lock
    done = start(project, "setup", "--download", "to take along", **have)
    assert done.returncode == 0, done.stderr
    names = sorted(file.name.split("-")[0] for file in (project / "to take along").iterdir())
    assert names == ["alpha", "beta", "uv"]

    subprocess.run(["rm", "-r", project / ".venv", index], check=True)
    done = start(project, "setup", "--wheels", "to take along")
    assert done.returncode == 0, done.stderr
    assert holds(project, "import alpha, beta; print(beta.version)") == "1.0\n"


def pip_of(python):
    code = "import os, pip; print(os.path.dirname(pip.__file__))"
    command = [python, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
