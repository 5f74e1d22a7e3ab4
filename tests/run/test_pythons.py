"""Which Python `run` sets up with: found on the machine, named, or one that holds NeMo."""

import os
import sys

from tests.run.conftest import (
    BASE_PYTHON,
    container,
    holds,
    lacks,
    set_up,
    start,
    write_program,
    write_wheel,
)

# ---- uv ----------------------------------------------------------------------------------------


def test_uv_is_installed_by_pip_and_otherwise_the_message_says_what_to_type(project):
    (project.parent / "bin/uv").unlink()
    done = start(project, "predict", python=None)
    assert done.returncode == 2
    assert "Install the package python3-venv" in done.stderr
    assert "Installing uv" in set_up(project)
    assert (project / ".venv/.uv/bin/uv").exists()
    assert "Installing uv" not in set_up(project, "--dev")


# ---- The Python --------------------------------------------------------------------------------


def test_a_python_of_no_use_is_refused_by_name(project):
    write_program(project.parent / "bin/old", "echo Python 3.10.13")
    write_program(project.parent / "bin/broken", "exit 127")
    for name in ("old", "broken", "3.10"):
        done = start(project, "predict", python=name)
        assert done.returncode == 2
        named = "name a Python from 3.11 to 3.13, or the path of one"
        assert done.stderr == f"run: PYTHON={name}: {named}\n"
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
