"""Which Python `run` sets up with: found on the machine, named, or one that holds NeMo."""

import json
import os
import platform
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.run.harness import (
    BASE_PYTHON,
    as_if_set_up,
    container,
    holds,
    lacks,
    set_up,
    start,
    write_program,
    write_wheel,
)

# ---- The machine -------------------------------------------------------------------------------


def test_other_machines_are_told_what_to_do(project):
    write_program(project.parent / "bin/uname", "echo Darwin arm64")
    done = start(project, "predict")
    assert done.returncode == 2
    assert "this is Darwin arm64, 64 bits" in done.stderr
    assert "x86_64 or aarch64, 64 bits, glibc 2.28 or later" in done.stderr
    assert "WSL2" in done.stderr
    assert "Dockerfile" in done.stderr
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
    assert set_up(project, "dev", python=python).count("Installing uv") == 0


def test_where_nothing_can_install_uv_the_message_says_what_to_type(project):
    (project.parent / "bin/uv").unlink()
    done = start(project, "predict", python=None)
    assert done.returncode == 2
    for remedy in ("apt install python3-venv", "dnf install python3-pip", "uv python install"):
        assert remedy in done.stderr
    assert not (project / ".venv").exists()


# ---- The Python --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("old", "Python 3.10.13"),
        ("broken", "no Python that runs"),
        ("3.10", "no program here"),
        ("/nowhere/python3.12", "no program here"),
    ],
)
def test_a_python_of_no_use_is_refused_by_name(project, name, found):
    write_program(project.parent / "bin/old", "echo 'Python 3.10.13'")
    write_program(project.parent / "bin/broken", "exit 127")
    done = start(project, "predict", python=name)
    assert done.returncode == 2
    expected = f"PYTHON={name}: is {found}; name 3.11, 3.12 or 3.13, or the path of one"
    assert expected in done.stderr
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


def without_packages(file):
    """What a Python needs that only makes virtual environments."""
    left_out = ("/site-packages/", "/test/", "/idlelib/", "/__pycache__")
    return None if any(part in file.name for part in left_out) else file


@pytest.mark.long
def test_where_no_python_is_uv_fetches_one(project, tmp_path):
    """From a mirror of the test's own, in place of the one where uv's Pythons are published."""
    version = "{}.{}.{}".format(*sys.version_info)
    with tarfile.open(tmp_path / "python.tar.gz", "w:gz", compresslevel=1) as file:
        file.add(sys.base_prefix, "python", filter=without_packages)
    published = {
        **{"name": "cpython", "os": "linux", "libc": "gnu", "variant": None, "prerelease": ""},
        **dict(zip(("major", "minor", "patch"), sys.version_info[:3], strict=True)),
        **{"arch": {"family": platform.machine(), "variant": None}, "build": "20240101"},
        **{"url": tmp_path.joinpath("python.tar.gz").as_uri(), "sha256": None},
    }
    key = f"cpython-{version}-linux-{platform.machine()}-gnu"
    (tmp_path / "pythons.json").write_text(json.dumps({key: published}))

    mirror = {"UV_PYTHON_DOWNLOADS_JSON_URL": str(tmp_path / "pythons.json")}
    # Offline, uv would not even look there; the wheels are all from the folder.
    done = start(project, "setup", "--wheels", "wheels", python=None, UV_OFFLINE="0", **mirror)
    assert done.returncode == 0, done.stderr
    home = project.parent / "home"
    assert holds(project, "import sys; print(sys.base_prefix)").startswith(str(home))
    assert holds(project, "import alpha; print(alpha.version)") == "1.0\n"


# ---- A Python that holds NeMo, as in NVIDIA's containers ---------------------------------------


def add_to_lock(project, *wheels, **requires):
    """Locks further packages, NAME==VERSION, with their wheels."""
    with (project / "requirements.lock").open("a") as lock:
        for name, _, version in (wheel.partition("==") for wheel in wheels):
            lock.write(write_wheel(project / "wheels", name, version, requires.get(name, ())))


def test_a_container_with_a_fitting_nemo_is_used_and_only_the_missing_added(project):
    lender = container(project, "2.7.0rc1", "0.15.2")
    # The first on the PATH has none.
    (project.parent / "bin/python3").symlink_to(BASE_PYTHON)
    write_program(project.parent / "bin/python", f'exec "{lender}" "$@"')
    packages = ("gamma==1.0", "unneeded==1.0", "torch==2.11.0", "nemo_toolkit==2.7.3", "alpha==2.0")
    (project / "requirements.lock").write_text("")
    add_to_lock(project, *packages, alpha=["gamma>=1", "torch>=2"])
    messages = set_up(project, python=None)
    assert "uses its packages, and gets what is missing" in messages
    versions = "import alpha, gamma, torch, nemo_toolkit as n; print(torch.version, n.version)"
    assert holds(project, versions) == "2.9 2.7.0rc1\n"
    assert lacks(project, "unneeded")

    messages = set_up(project, "dev", python=None)
    assert "uses the packages of" in messages
    assert holds(project, "import beta; print(beta.version)") == "1.0\n"
    assert holds(project, versions) == "2.9 2.7.0rc1\n"


def test_an_environment_named_by_its_folder_is_used_with_the_projects_own_megakit(project):
    others, wheels = (project / "wheels").rename(project / "others"), project / "wheels"
    wheels.mkdir()
    lock, pins = project / "requirements.lock", ["nemo_toolkit==2.7.3", "torch==2.11.0", "beta"]
    lock.write_text(
        write_wheel(others, "beta", "1.0") + write_wheel(wheels, "megakit", "1.0", requires=pins)
    )
    (project / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "0"\ndependencies = ["megakit==1.0"]\n'
    )
    lender = container(project, "2.7.0rc1", "0.15.2").parents[1]
    (packages,) = lender.glob("lib/python3*/site-packages")
    write_wheel(lender, "megakit", "1.0")
    zipfile.ZipFile(lender / "megakit-1.0-py3-none-any.whl").extractall(packages)
    # As on a network; what the project carries itself is not asked for there.
    package = others / "beta"
    package.mkdir()
    (package / "index.html").write_text('<a href="../beta-1.0-py3-none-any.whl">beta</a>')
    index = {"UV_DEFAULT_INDEX": others.as_uri(), "UV_OFFLINE": "0"}
    write_program(project.parent / "bin/df", "echo Avail; echo 1GB")  # no gigabytes are needed
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

    again = start(project, "setup", "--venv", project)
    assert again.returncode == 2
    assert "has no bin/python" in again.stderr


def test_an_environment_that_is_set_up_borrows_nothing(project):
    as_if_set_up(project, "echo ran")
    lender = container(project, "2.7.0rc1", "0.15.2").parents[1]
    before = sorted((project / ".venv").rglob("*"))
    done = start(project, "setup", "--venv", lender, python=None)
    assert done.returncode == 2
    assert f"{project}/.venv is set up already; remove it first" in done.stderr
    assert sorted((project / ".venv").rglob("*")) == before


@pytest.mark.parametrize(
    ("nemo", "megatron", "python"),
    [("2.7.0", "0.13.1", "3.12.1"), ("2.7.0", "0.15.2", "3.10.13")],
)
def test_a_python_that_does_not_fit_lends_nothing(project, nemo, megatron, python):
    answer = f"Python {python} with nemo-toolkit {nemo} megatron-core {megatron}"
    lender = container(project, nemo, megatron).parents[1]
    if python == "3.10.13":  # as lender.py says there
        write_program(lender / "bin/python", f'echo "{answer} torchvision 0.24"')
    done = start(project, "setup", "--venv", lender)
    assert done.returncode == 2
    assert f"nemo-toolkit {nemo} megatron-core {megatron} torchvision 0.24." in done.stderr
    assert "NeMo 2.7, Megatron-Core 0.15 and torchvision is needed" in done.stderr
    assert not (project / ".venv").exists()
