"""`run` beside tiny locks and wheels, with real virtual environments and the real pip."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile

from tests.scripts import REPOSITORY

RUN = REPOSITORY / "run"
# What `run` calls besides Python; on a PATH of its own it finds these and nothing else.
TOOLS = """
    awk bash basename cat comm cmp cp cut dirname df env find flock grep head ls mkdir mktemp mv
    readlink realpath rm sed sort tail tee tr uname wc xargs
"""
BASE_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def write_wheel(folder, name, version, requires=()):
    """A wheel that holds one module with its version; returns its entry in a lock."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in requires)
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
        wheel.writestr(
            f"{info}/RECORD", "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    pin = f"{name.replace('_', '-')}=={version} ; python_version < '3.13'"
    return f"{pin} \\\n    --hash=sha256:{digest}\n"


def write_index(folder):
    """Makes a folder of wheels an index of packages."""
    for wheel in folder.glob("*.whl"):
        package = folder / wheel.name.split("-")[0].replace("_", "-")
        package.mkdir()
        (package / "index.html").write_text(f'<a href="../{wheel.name}">{wheel.name}</a>')


def write_project(folder):
    """`run` with a lock of two packages, their wheels, and a script that shows how it started."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    shutil.copy(RUN, folder / "run")
    lock = [write_wheel(wheels, name, "1.0") for name in ("setuptools", "alpha")]
    (folder / "requirements.lock").write_text("".join(lock))
    (folder / "pyproject.toml").write_text(
        '[project]\ndependencies = ["nemo_toolkit==2.7.3", "alpha"]\n'
        '[dependency-groups]\ndev = ["beta"]\n'
    )
    (folder / "model_predict.py").write_text(
        "import os, sys, alpha\nprint(os.getcwd(), alpha.version, *sys.argv[1:], sep='|')\n"
    )
    for verbs_own in ("notebooks", "benchmarks", "template"):
        (folder / verbs_own).mkdir()
    tools = folder.parent / "bin"
    tools.mkdir()
    for tool in TOOLS.split():
        (tools / tool).symlink_to(shutil.which(tool))
    # As if there were room: these few kilobytes need none.
    write_program(tools / "df", "echo ' Avail'; echo '  100GB'")
    return folder


def write_program(path, script):
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def bare_environment(project, python=BASE_PYTHON):
    """No network, no home, and on the PATH no Python."""
    environment = {"PATH": str(project.parent / "bin"), "HOME": project.parent / "home"}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    return environment | ({"PYTHON": python} if python else {})


def start(project, *arguments, cwd=None, python=BASE_PYTHON, **environment):
    """`./run ARGUMENTS` to its end."""
    return subprocess.run(
        [project / "run", *arguments],
        cwd=cwd or project,
        env=bare_environment(project, python) | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def set_up(project, **options):
    done = start(project, "setup", "--wheels", "wheels", **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def holds(project, code):
    python = project / ".venv/bin/python"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


def lent(function, *arguments, text="", env=None):
    """What a function of `run` prints when another script sources it."""
    command = ["bash", "-c", f'source "{RUN}"; {function} "$@"', "bash", *arguments]
    options = {"input": text, "capture_output": True, "text": True, "env": env}
    return subprocess.run(command, check=True, **options).stdout


def as_if_set_up(project, python):
    """A .venv that counts as ready; its Python is a bash script."""
    venv = project / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "lib/python3.12").mkdir(parents=True)
    shutil.copy(project / "requirements.lock", venv / ".setup-done")
    write_program(venv / "bin/python", python)


def container(project, nemo, megatron, has_pip=False):
    """A virtual environment with packages of those names, as NVIDIA's image has one."""
    folder = project.parent / "container"
    options = [] if has_pip else ["--without-pip"]
    subprocess.run([BASE_PYTHON, "-m", "venv", *options, folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    held = {"nemo_toolkit": nemo, "megatron_core": megatron, "torch": "2.9", "torchvision": "0.24"}
    for name, version in held.items():
        write_wheel(folder, name, version)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(packages)
    return folder / "bin/python"
