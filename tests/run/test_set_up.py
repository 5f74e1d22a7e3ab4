"""The set-up of .venv from the locks."""

import os
import subprocess
import time

import pytest

from tests.run.harness import (
    BASE_PYTHON,
    UV,
    bare_environment,
    holds,
    lacks,
    set_up,
    start,
    write_program,
    write_wheel,
)

# ---- Before it fills the disk ------------------------------------------------------------------


def test_too_little_room_is_refused_with_value_rule_and_remedy(project):
    write_program(project.parent / "bin/df", "echo Avail; echo 3GB")
    done = start(project, "setup")
    assert done.returncode == 2
    assert "3 GB free" in done.stderr
    assert "needs 6 GB" in done.stderr
    assert "VENV=" in done.stderr
    assert not (project / ".venv").exists()


@pytest.mark.parametrize("disk", ["a project", "cache"])
def test_room_is_asked_for_on_the_disk_of_the_cache_too(project, disk):
    cache = project.parent / "cache/of/mine"
    cache.parents[1].mkdir()
    full = f'[[ ${{!#}} == */"{disk}"* ]] && echo 3GB || echo 30GB'
    write_program(project.parent / "bin/df", f"echo Avail; {full}")
    done = start(project, "setup", UV_CACHE_DIR=str(cache))
    assert done.returncode == 2
    assert f"{project.parent / disk}" in done.stderr
    assert "has 3 GB free, this needs 6 GB" in done.stderr
    assert [*cache.parents[1].iterdir()] == []


@pytest.mark.parametrize("place", ["run/below", "run"])
def test_a_cache_that_cannot_be_written_is_replaced(project, place):
    set_up(project, UV_CACHE_DIR=place, XDG_CACHE_HOME=place)
    assert (project / ".venv/.uv/cache").is_dir()


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
        (".venv", "requirements.lock is missing"),
        (".venv", "locks/dev.lock is missing"),
    ],
)
def test_what_cannot_be_set_up_is_refused_and_leaves_nothing(project, place, reason):
    if "missing" in reason:
        (project / reason.split()[0]).unlink()
    (project / "locks/notebook.lock").touch()
    verb = "tests" if "missing" in reason else "notebook"
    if reason.startswith("locks"):  # the group of a verb
        verb = "notebook"
        (project / "locks/notebook.lock").unlink()
        reason = "locks/notebook.lock is missing"
    before = sorted(project.rglob("*"))
    done = start(project, verb, VENV=place)
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


@pytest.mark.parametrize("may_write", [True, False])
def test_packages_are_compiled_where_python_may_not_do_that_later(project, may_write):
    set_up(project, **({} if may_write else {"PYTHONDONTWRITEBYTECODE": "1"}))
    compiled = [*project.glob(".venv/lib/python3*/site-packages/__pycache__/alpha.*.pyc")]
    assert bool(compiled) != may_write


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
    write_program(project.parent / "bin/df", "echo Avail; echo 2GB")
    refused = start(project, "setup", "dev")
    assert "has 2 GB free, this needs 3 GB" in refused.stderr
    write_program(project.parent / "bin/df", "echo Avail; echo 3GB")
    messages = set_up(project, "dev")
    assert messages.count("Installing ") == 1
    assert "locks/dev.lock" in messages
    assert holds(project, "import beta; print(beta.version)") == "1.0\n"
    assert set_up(project, "dev") == f"{project}/.venv is set up.\n"


def test_a_group_that_cannot_be_had_leaves_the_tutorial_as_it_was(project):
    set_up(project)
    done = start(project, "setup", "dev")  # without the wheels
    assert done.returncode == 1
    assert "set-up stopped" in done.stderr
    done = start(project, "predict", python=None)
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_setpriv_that_knows_no_pdeathsig_as_busyboxs_is_done_without(project):
    write_program(project.parent / "bin/setpriv", "exit 1")
    set_up(project)
    assert holds(project, "import alpha; print(alpha.version)") == "1.0\n"


BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")


@pytest.mark.skipif(
    not any(map(os.path.exists, BUNDLES)), reason="this machine has no certificates"
)
def test_uv_gets_the_systems_certificates_and_pips_settings(project, tmp_path):
    set_up(project)
    told = tmp_path / "environment"
    write_program(project / ".venv/.uv/bin/uv", f'env > "{told}"; exec "{UV}" "$@"')
    index = (tmp_path / "index").as_uri()
    set_up(project, "dev", PIP_CERT="/a/proxy.pem", PIP_INDEX_URL=index)
    settings = told.read_text().splitlines()
    assert "UV_SYSTEM_CERTS=1" in settings
    assert "SSL_CERT_FILE=/a/proxy.pem" in settings
    assert f"UV_DEFAULT_INDEX={index}" in settings
    set_up(project, "uv", UV_SYSTEM_CERTS="false")
    assert "UV_SYSTEM_CERTS=false" in told.read_text().splitlines()


def test_a_virtual_environment_that_somebody_made_is_filled_and_not_emptied(project):
    subprocess.run([BASE_PYTHON, "-m", "venv", project / ".venv"], check=True)
    (project / ".venv/mine").touch()
    set_up(project)
    assert (project / ".venv/mine").exists()
    assert holds(project, "import alpha, pip; print(alpha.version)") == "1.0\n"


def test_a_virtual_environment_that_somebody_made_is_not_emptied_later_either(project):
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", project / ".venv"], check=True)
    (project / ".venv/mine").touch()
    set_up(project)
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


def test_groups_come_along_when_a_set_up_is_made_anew(project):
    set_up(project, "dev")
    (project / ".venv/.locks/unfinished").touch()
    set_up(project)
    assert holds(project, "import alpha, beta; print(beta.version)") == "1.0\n"


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


@pytest.mark.parametrize("missing", ["alpha", "beta", "uv"])
def test_half_a_folder_of_wheels_says_what_is_missing(project, missing):
    (project / f"wheels/{missing}-1.0-py3-none-any.whl").unlink()
    done = start(project, "setup", "--wheels", "wheels", UV_FIND_LINKS="")
    assert done.returncode == 1
    assert missing in done.stderr
    assert "set-up stopped, for the reason above" in done.stderr


def test_altered_wheel_is_refused_and_the_next_start_recovers(project):
    wheel = project / "wheels/alpha-1.0-py3-none-any.whl"
    good = wheel.read_bytes()
    write_wheel(project / "wheels", "alpha", "1.0", requires=["something-else"])
    done = start(project, "setup", "--wheels", "wheels")
    assert done.returncode == 1
    assert "Hash mismatch for `alpha==1.0`" in done.stderr
    wheel.write_bytes(good)
    set_up(project)


def test_an_edited_lock_is_refused(project):
    lock = project / "requirements.lock"
    lock.write_text(lock.read_text().split(" \\")[0] + "\n")
    done = start(project, "setup", "--wheels", "wheels")
    assert done.returncode == 1
    assert "In `--require-hashes` mode, all requirements must have a hash" in done.stderr


@pytest.mark.long
def test_two_at_once_set_up_once(project):
    command = [project / "run", "setup", "--wheels", "wheels"]
    options = {"cwd": project, "env": bare_environment(project), "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, text=True, **options) for _ in range(2)]
    messages = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], messages
    assert sum("waiting for it" in message for message in messages) == 1
    assert sum("Installing requirements.lock" in message for message in messages) == 1
