"""`run` beside tiny locks and wheels, with real virtual environments and the real uv and pip."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY

# What `run` calls besides Python; on a PATH of its own it finds these and nothing else.
TOOLS = """
    bash cat cmp cp cut dirname flock grep ls mkdir readlink realpath rm sed sh sort touch tr uname
"""
BASE_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
UV = Path(sys.prefix, "bin/uv")


def write_wheel(folder, name, version, scripts=None):
    """A wheel that holds one module with its version; returns its entry in a lock."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    files: dict[str | zipfile.ZipInfo, str] = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    for script, text in (scripts or {}).items():
        entry = zipfile.ZipInfo(f"{name}-{version}.data/scripts/{script}")
        entry.external_attr = 0o100755 << 16  # may be executed
        files[entry] = text
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
        names = [*wheel.namelist(), f"{info}/RECORD"]
        wheel.writestr(names[-1], "".join(f"{name},,\n" for name in names))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    pin = f"{name.replace('_', '-')}=={version} ; python_version < '3.14'"
    return f"{pin} \\\n    --hash=sha256:{digest}\n"


@pytest.fixture
def project(tmp_path):
    """`run` with two locks of one package each, and a script that shows its start."""
    folder = tmp_path / "a project"
    wheels = folder / "index"
    wheels.mkdir(parents=True)
    for name in ("run", "run_setup.sh"):
        shutil.copy(REPOSITORY / name, folder / name)
    # As little as pip needs to install it, and the uv of these tests.
    uv = write_wheel(wheels, "uv", "1.0", scripts={"uv": f'#!/bin/sh\nexec "{UV}" "$@"\n'})
    (folder / "requirements.lock").write_text(write_wheel(wheels, "alpha", "1.0"))
    (folder / "requirements-dev.lock").write_text(write_wheel(wheels, "beta", "1.0") + uv)
    only_uv = folder.parent / "only uv"
    only_uv.mkdir()
    shutil.copy(wheels / "uv-1.0-py3-none-any.whl", only_uv)
    (folder / "model_predict.py").write_text(
        '"""Stage 3: predict."""\n'
        "import os, sys, alpha\nprint(os.getcwd(), alpha.version, *sys.argv[1:], sep='|')\n"
    )
    for number, stage in enumerate(("pretrain", "finetune"), start=1):
        script = folder / f"model_{stage}.py"
        script.write_text(f'"""Stage {number}: {stage} a model. More of it."""\n')
    (folder / "mnist").mkdir()
    (folder / "mnist/tutorial.py").touch()
    started = ("notebooks/mnist_megatron.py", "benchmarks/run_all.py", "template/new.py")
    for script in (
        *started,
        "ladder/climb.py",
        "exercises/exercise.py",
        "experiments/experiment.py",
        "tools/layout.py",
        "tools/check.py",
        "tools/trace.py",
        "tools/compare.py",
    ):
        (folder / script).parent.mkdir(parents=True, exist_ok=True)
        (folder / script).touch()
    tools = folder.parent / "bin"
    tools.mkdir()
    for tool in TOOLS.split():
        (tools / tool).symlink_to(shutil.which(tool))
    (tools / "uv").symlink_to(UV)
    (folder.parent / "home").mkdir()
    return folder


def write_program(path, script):
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def bare_environment(project, python=BASE_PYTHON):
    """No network, on the PATH no Python, and of the packages only uv itself."""
    environment = {"PATH": str(project.parent / "bin"), "HOME": str(project.parent / "home")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "UV_OFFLINE": "1"}
    only_uv = project.parent / "only uv"
    environment |= {"PIP_FIND_LINKS": only_uv.as_uri(), "UV_FIND_LINKS": str(only_uv)}
    return environment | ({"PYTHON": str(python)} if python else {})


def start(project, *arguments, cwd=None, python=BASE_PYTHON, before=None, **environment):
    """`./run ARGUMENTS` to its end; `before` is called in its process."""
    return subprocess.run(
        [project / "run", *arguments],
        cwd=cwd or project,
        env=bare_environment(project, python) | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=before,
    )


def set_up(project, *arguments, **options):
    """Sets up from the project's wheels, as from an index; returns the messages."""
    options = {"UV_FIND_LINKS": str(project / "index"), **options}
    done = start(project, "setup", *arguments, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def holds(project, code):
    python = project / ".venv/bin/python"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


def lacks(project, module):
    code = f"import importlib.util as u; print(u.find_spec({module!r}))"
    return holds(project, code) == "None\n"


def as_if_set_up(project, python):
    """A .venv that counts as ready, with both locks; its Python is a bash script."""
    venv = project / ".venv"
    for folder in ("bin", ".locks"):
        (venv / folder).mkdir(parents=True)
    for lock in project.glob("*.lock"):
        shutil.copy(lock, venv / ".locks")
    version = "[[ $1 != --version ]] || { echo Python 3.12.1; exit; }"
    write_program(venv / "bin/python", f"{version}\n{python}")


def container(project, nemo, megatron):
    """A virtual environment with packages of those names, as NVIDIA's image has one."""
    folder = project.parent / "container"
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    held = {"nemo_toolkit": nemo, "megatron_core": megatron, "torch": "2.9", "torchvision": "0.24"}
    for name, version in held.items():
        write_wheel(folder, name, version)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(packages)
    return folder / "bin/python"
