"""Which Python `run` sets up with: found on the machine, named, or one that holds NeMo."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.run.conftest import (
    BASE_PYTHON,
    add_nemo,
    container,
    holds,
    lacks,
    set_up,
    start,
    write_program,
    write_wheel,
)


def test_other_machines_are_told_what_to_do(project):
    write_program(project.parent / "bin/uname", "echo Darwin arm64")
    done = start(project, "predict")
    assert done.returncode == 2
    for words in ("this is Darwin arm64", "x86_64 or aarch64", "WSL2", "Dockerfile"):
        assert words in done.stderr
    assert not (project / ".venv").exists()


# ---- uv ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["pip", "venv"])
def test_uv_is_installed_by_what_is_there(project, tmp_path, way):
    """By any Python's pip, or by that of a virtual environment; elsewhere, by a uv on the PATH."""
    (project.parent / "bin/uv").unlink()
    bare = tmp_path / "bare"
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", bare], check=True)
    python = bare / "bin/python" if way == "venv" else BASE_PYTHON
    messages = set_up(project, python=python)
    assert "Installing uv" in messages
    assert (project / ".venv/.uv/bin/uv").exists()
    assert set_up(project, "--dev", python=python).count("Installing uv") == 0


def test_where_nothing_can_install_uv_the_message_says_what_to_type(project):
    (project.parent / "bin/uv").unlink()
    done = start(project, "predict", python=None)
    assert done.returncode == 2
    assert "Install the package python3-venv" in done.stderr


# ---- The Python --------------------------------------------------------------------------------


def test_a_python_of_no_use_is_refused_by_name(project):
    write_program(project.parent / "bin/old", "echo Python 3.10.13")
    write_program(project.parent / "bin/broken", "exit 127")
    for name in ("old", "broken", "3.10", "/nowhere/python3.12"):
        done = start(project, "predict", python=name)
        assert done.returncode == 2
        assert done.stderr == f"run: PYTHON={name}: name 3.11, 3.12 or 3.13, or the path of one\n"
    assert not (project / ".venv").exists()


def test_a_python_is_named_by_its_number(project):
    number = "{}.{}".format(*sys.version_info)
    (project.parent / f"bin/python{number}").symlink_to(BASE_PYTHON)
    set_up(project, python=number)
    assert os.path.realpath(project / ".venv/bin/python") == BASE_PYTHON
    other = "3.12" if number == "3.11" else "3.11"
    done = start(project, "predict", python=other)  # isn't here, and can't be fetched
    assert done.returncode == 2
    assert f"uv neither found nor fetched Python {other}" in done.stderr


# ---- A Python that holds NeMo, as in NVIDIA's containers ---------------------------------------


NAMES = "import torch, nemo_toolkit as nemo; print(torch.version, nemo.version)"


def test_a_container_with_a_fitting_nemo_is_used_and_only_the_missing_added(project):
    lender = container(project, "2.7.0rc1", "0.15.2")
    # The first on the PATH has none.
    (project.parent / "bin/python3").symlink_to(BASE_PYTHON)
    write_program(project.parent / "bin/python", f'exec "{lender}" "$@"')
    with (project / "requirements.lock").open("a") as lock:
        for name in ("torch", "nvidia_cublas", "nemo_toolkit"):
            lock.write(write_wheel(project / "index", name, "9.0"))
    messages = set_up(project, python=None)
    assert f"in {project}/.venv, which uses the packages of {project.parent}." in messages
    assert holds(project, f"import alpha; {NAMES}") == "2.9 2.7.0rc1\n"
    assert lacks(project, "nvidia_cublas")

    set_up(project, "--dev", python=None)
    assert holds(project, f"import beta; {NAMES}") == "2.9 2.7.0rc1\n"


def test_a_new_project_uses_the_packages_of_the_tutorial_and_its_own_megakit(project):
    """Without a network: uv is the tutorial's, too."""
    set_up(project)
    add_nemo(project / ".venv")
    before = sorted((project / ".venv").rglob("*"))
    mine = shutil.copytree(project, project.parent / "mine", ignore=lambda *_: [".venv", "index"])
    (mine / "wheels").mkdir()
    with (mine / "requirements.lock").open("a") as lock:
        lock.write(write_wheel(mine / "wheels", "megakit", "1.0"))
    done = start(mine, "setup", "--venv", project / ".venv", UV_FIND_LINKS="", PIP_FIND_LINKS="")
    assert done.returncode == 0, done.stderr
    assert sorted((project / ".venv").rglob("*")) == before
    # Without the folder that the tests run in, which has a megakit, too.
    code = "import sys; sys.path.pop(0); import megakit; print(megakit.version)"
    assert holds(mine, code) == "1.0\n"
    assert holds(mine, f"import alpha; {NAMES}") == "2.9 2.7.0rc1\n"


def test_a_python_that_does_not_fit_lends_nothing(project):
    lender = container(project, "2.7.0", "0.13.1").parents[1]
    done = start(project, "setup", "--venv", lender)
    assert done.returncode == 2
    assert "is no environment of Python 3.11 to 3.13 with NeMo 2.7, Megatron-Core" in done.stderr
    assert not (project / ".venv").exists()
