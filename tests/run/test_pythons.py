"""Which Python `run` sets up with: found on the machine, named, or one that holds NeMo."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.run.harness import (
    BASE_PYTHON,
    RUN,
    as_if_set_up,
    bare_environment,
    container,
    holds,
    lent,
    set_up,
    start,
    write_index,
    write_program,
    write_wheel,
)


def test_no_python_says_how_to_get_one(project):
    done = start(project, "predict", python=None)
    assert done.returncode == 2
    for remedy in ("apt install python3.12-venv", "pyenv install", "uv python install", "PYTHON="):
        assert remedy in done.stderr
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("echo 'is Python 3.13' >&2; exit 1", "is Python 3.13"),
        ("echo 'pyenv: python3: command not found'; exit 127", "does not run"),
    ],
)
def test_python_of_no_use_is_named_with_the_reason(project, answer, reason):
    python = write_program(project.parent / "bin/python3", answer)
    done = start(project, "predict", python=None)
    assert done.returncode == 2
    assert f"{python} {reason}" in done.stderr


def test_the_probe_itself_refuses_other_versions(project):
    command = f'source "{RUN}"; {BASE_PYTHON} -I -c "$PROBE" 2.7'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "is Python {}.{}\n".format(*sys.version_info)


def test_other_machines_are_told_what_to_do(project):
    write_program(project.parent / "bin/uname", "echo Darwin arm64")
    done = start(project, "predict")
    assert done.returncode == 2
    assert "this is Darwin arm64" in done.stderr
    assert "Dockerfile" in done.stderr


# ---- A Python that holds NeMo, as in NVIDIA's containers ---------------------------------------


def test_the_first_python_that_holds_a_fitting_nemo_is_preferred(project):
    holds_nemo = container(project, "2.7.0", "0.15.2")
    for name, python in (("python3.12", BASE_PYTHON), ("python3", holds_nemo)):
        write_program(project.parent / "bin" / name, f'exec "{python}" "$@"')
    answer = lent("find_python", "3.12", "3.11", env=bare_environment(project, python=None))
    assert answer == f"{holds_nemo}\tfits\t2.7.0\t0.15.2\n"


def test_a_python_with_fitting_nemo_is_used_and_only_the_missing_added(project):
    wheels, lock = project / "wheels", project / "requirements.lock"
    lock.write_text(
        lock.read_text()
        + write_wheel(wheels, "beta", "1.0", requires=["gamma>=1", "torch>=2"])
        + write_wheel(wheels, "gamma", "1.0")
        + write_wheel(wheels, "unneeded", "1.0")
        + write_wheel(wheels, "torch", "2.11.0")
        + write_wheel(wheels, "nemo_toolkit", "2.7.3")
    )
    messages = set_up(project, python=container(project, "2.7.0rc1", "0.15.2"))
    assert "holds NeMo 2.7.0rc1 and Megatron-Core 0.15.2: using them" in messages
    versions = (
        "import alpha, beta, gamma, torch, nemo_toolkit as n; print(torch.version, n.version)"
    )
    assert holds(project, versions) == "2.9 2.7.0rc1\n"
    assert holds(project, "import importlib.util as u; print(u.find_spec('unneeded'))") == "None\n"
    assert "set up" in set_up(project, python=None)


def test_an_environment_named_by_its_folder_is_used_with_the_projects_own_megakit(project):
    others, wheels = (project / "wheels").rename(project / "others"), project / "wheels"
    wheels.mkdir()
    lock, pins = project / "requirements.lock", ["nemo_toolkit==2.7.3", "torch==2.11.0", "beta"]
    lock.write_text(
        lock.read_text()
        + write_wheel(others, "beta", "1.0")
        + write_wheel(wheels, "megakit", "1.0", requires=pins)
    )
    (project / "pyproject.toml").write_text(
        '[project]\ndependencies = ["megakit==1.0"]\n[dependency-groups]\nbuild = ["setuptools"]\n'
    )
    lender = container(project, "2.7.0rc1", "0.15.2", has_pip=True).parents[1]
    (packages,) = lender.glob("lib/python3*/site-packages")
    write_wheel(lender, "megakit", "1.0")
    write_wheel(lender, "setuptools", "1.0")
    for old in packages.glob("setuptools*"):
        shutil.rmtree(old)
    for name in ("megakit", "setuptools"):
        zipfile.ZipFile(lender / f"{name}-1.0-py3-none-any.whl").extractall(packages)
    # As on a network; what the project carries itself is not asked for there.
    write_index(others)
    (others / "setuptools-1.0-py3-none-any.whl").unlink()  # the lender has it, and pip
    index = {"PIP_INDEX_URL": others.as_uri(), "PIP_NO_INDEX": "0"}
    done = start(project, "setup", "--venv", lender, **index)
    assert done.returncode == 0, done.stderr
    # Without the folder that the tests run in, which has a megakit, too.
    imported = holds(
        project, "import sys; sys.path.pop(0); import megakit; print(megakit.__file__)"
    )
    assert imported.startswith(f"{project}/.venv/")
    assert holds(project, "import beta; print(beta.version)") == "1.0\n"
    versions = "import torch, nemo_toolkit as n; print(torch.version, n.version)"
    assert holds(project, versions) == "2.9 2.7.0rc1\n"
    assert holds(project, "import pip; print(pip.__file__)").startswith(f"{lender}/")

    again = start(project, "setup", "--venv", project)
    assert again.returncode == 2
    assert "has no bin/python" in again.stderr


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (".setup-done", "<venv> is set up already; remove it first"),
        ("pyvenv.cfg", "<venv> is there already, and not made by ./run; move it away"),
    ],
)
def test_a_folder_that_is_in_use_borrows_nothing(project, held, reason):
    as_if_set_up(project, "echo ran")
    venv = project / ".venv"
    (venv / ".setup-done").rename(venv / held)
    lender = container(project, "2.7.0rc1", "0.15.2").parents[1]
    before = sorted(venv.rglob("*"))
    done = start(project, "setup", "--venv", lender, python=None)
    assert done.returncode == 2
    assert reason.replace("<venv>", str(venv)) in done.stderr
    assert sorted(venv.rglob("*")) == before


def test_a_python_that_does_not_fit_lends_nothing(project):
    (project / "lender/bin").mkdir(parents=True)
    write_program(project / "lender/bin/python", "echo is Python 3.13 >&2; exit 1")
    done = start(project, "setup", "--venv", "lender")
    assert done.returncode == 2
    assert "lender: its Python is Python 3.13; 3.11 or 3.12 is needed" in done.stderr
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    ("nemo", "megatron", "told"),
    [
        ("2.5.0", "0.13.1", "This project needs 2.7 and 0.15: .venv gets them."),
        ("2.7.0", "0.15.2", "That did not work; making a .venv with a NeMo of its own instead."),
    ],
    ids=["does not fit", "lacks packages that are nowhere"],
)
def test_a_nemo_of_no_use_is_named_before_room_is_asked_for(project, nemo, megatron, told):
    write_program(project.parent / "bin/df", "echo Avail; echo 3GB")
    done = start(project, "setup", python=container(project, nemo, megatron))
    assert done.returncode == 2
    assert f"holds NeMo {nemo} and Megatron-Core {megatron}" in done.stderr
    *_, before, last = done.stderr.splitlines()
    assert before.endswith(told)
    assert "this needs 12 GB" in last
    assert not (project / ".venv").exists()


@pytest.mark.long
def test_a_python_with_another_nemo_is_left_alone(project):
    set_up(project, python=container(project, "2.5.0", "0.13.1"))
    assert holds(project, "import importlib.util as u; print(u.find_spec('torch'))") == "None\n"
