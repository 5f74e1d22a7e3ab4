"""The set-up in `run`: on tiny locks, with real virtual environments and the real pip."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "run"
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


@pytest.fixture
def project(tmp_path):
    """`run` with a lock of two packages, their wheels, and a script that shows how it started."""
    folder = tmp_path / "a project"
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
    tools = tmp_path / "bin"
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
    environment = {"PATH": project.parent / "bin", "HOME": project.parent / "home"}
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


def lent(function, *arguments, text=""):
    """What a function of `run` prints when another script sources it."""
    command = ["bash", "-c", f'source "{RUN}"; {function} "$@"', "bash", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


# ---- Verbs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("setup", "--help")])
def test_help_lists_the_verbs_and_sets_up_nothing(project, arguments):
    done = start(project, *arguments, python=None)
    assert done.returncode == 0
    assert done.stderr == ""
    listed = re.findall(r"^  (\w+) ", done.stdout, flags=re.MULTILINE)
    verbs = "tutorial tests pretrain finetune predict tensorboard notebook benchmarks new setup"
    assert " ".join(listed) == verbs
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tutoral"], "no verb 'tutoral'"),
        (["setup", "--wheel", "x"], "--download DIR, --wheels DIR or --venv DIR, not --wheel"),
        (["setup", "--wheels"], "--wheels takes one folder"),
        (["setup", "--wheels", "nowhere"], "no wheels in nowhere"),
    ],
)
def test_bad_arguments_are_refused_in_one_message(project, arguments, message):
    done = start(project, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        (["tutorial", "--seed", "1"], "<root>/mnist/tutorial.py|--seed|1"),
        (["pretrain"], "<root>/model_pretrain.py"),
        (["finetune", "--lr", "1e-3"], "<root>/model_finetune.py|--lr|1e-3"),
        (["predict", "--help"], "<root>/model_predict.py|--help"),
        (["tensorboard", "--port", "1"], "-W|ignore|-P|-m|tensorboard.main|--logdir|runs|--port|1"),
        (
            ["notebook", "--no-browser"],
            "-P|-m|notebook|--ServerApp.root_dir=<root>"
            "|--JupyterNotebookApp.default_url=/notebooks/notebooks/mnist_megatron.ipynb"
            "|--no-browser",
        ),
        (["notebook", "--renew"], "<root>/notebooks/renew.py"),
        (["benchmarks", "data"], "<root>/benchmarks/run_all.py|data"),
        (["tests", "-k", "a b"], "-m|pytest|-k|a b"),
        (["tests", "-x", "--all"], "-m|pytest|-x|--all"),
    ],
)
def test_verbs_call_what_they_stand_for_at_once(project, arguments, called):
    venv = project / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "lib/python3.12").mkdir(parents=True)
    shutil.copy(project / "requirements.lock", venv / ".setup-done")
    write_program(venv / "bin/python", "IFS='|'; echo \"$*\"")
    began = time.perf_counter()
    done = start(project, *arguments, python=None)
    assert time.perf_counter() - began < 5
    assert done.stdout.replace(str(project), "<root>") == called + "\n"
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_closed_streams_are_no_failure(project, closed):
    venv = project / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "lib/python3.12").mkdir(parents=True)
    shutil.copy(project / "requirements.lock", venv / ".setup-done")
    write_program(venv / "bin/python", "exit 3")  # not to be called

    def close():
        for descriptor in closed:
            os.close(descriptor)

    done = subprocess.run(
        [project / "run", "setup"],
        env=bare_environment(project, python=None),
        preexec_fn=close,
        timeout=60,
    )
    assert done.returncode == 0


def test_no_verb_imports_from_the_current_folder(project, tmp_path):
    """Whoever stands in a folder of downloads runs nothing of it."""
    venv, honest = project / ".venv", "import json, torch\nprint('honest')\n"
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", venv], check=True)
    shutil.copy(project / "requirements.lock", venv / ".setup-done")
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "torch.py").touch()
    scripts = ["mnist/tutorial.py", "notebooks/renew.py", "benchmarks/run_all.py"]
    scripts += [f"model_{stage}.py" for stage in ("pretrain", "finetune", "predict")]
    modules = ["tensorboard/main.py", "notebook/__main__.py", "pytest/__main__.py"]
    for file in (*(project / name for name in scripts), *(packages / name for name in modules)):
        file.parent.mkdir(exist_ok=True)
        file.write_text(honest)

    downloads = tmp_path / "downloads"
    downloads.mkdir()
    for name in ("tensorboard", "notebook", "pytest", "pip", "torch", "json", "sitecustomize"):
        (downloads / f"{name}.py").write_text("open('mark', 'w').close()\nprint('hostile')\n")
    verbs = ["tutorial", "tests", "pretrain", "finetune", "predict", "tensorboard", "benchmarks"]
    for verb in (*verbs, "notebook", "notebook --renew"):
        done = start(project, *verb.split(), cwd=downloads, python=None)
        assert (done.stdout, done.stderr) == ("honest\n", ""), verb
    assert not (downloads / "mark").exists()


# ---- Which Python ------------------------------------------------------------------------------


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


def test_python_is_found_on_the_path_past_one_that_does_not_run(project):
    write_program(project.parent / "bin/python3.12", "exit 127")
    (project.parent / "bin/python3").symlink_to(BASE_PYTHON)
    set_up(project, python=None)
    assert os.path.realpath(project / ".venv/bin/python") == BASE_PYTHON


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


# ---- Setting up --------------------------------------------------------------------------------


def test_setuptools_is_cut_out_of_the_lock_with_its_hashes_and_no_more():
    entry = lent("lock_entry", "setuptools", text=(ROOT / "requirements.lock").read_text())
    first, *hashes = entry.splitlines()
    assert first.startswith("setuptools==")
    assert hashes
    assert all(line.strip().startswith("--hash=sha256:") for line in hashes)


def test_every_line_of_the_lock_is_counted():
    text = (ROOT / "requirements.lock").read_text()
    names = lent("lock_names", text=text).split()
    pins = [line for line in text.splitlines() if not line.startswith((" ", "#")) and line]
    assert names == sorted({re.split(r"\[|==", pin)[0] for pin in pins})


def test_set_up_once_then_runs_at_once_from_any_folder(project, tmp_path):
    # What clusters' modules and NVIDIA's images set must not reach pip.
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("alpha==3.0\n")
    messages = set_up(project, PIP_CONSTRAINT=str(constraint), PIP_USER="1")
    assert BASE_PYTHON in messages
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


def half_set_up(project):
    """A set-up that has begun to fill .venv, in a process group of its own."""
    started = subprocess.Popen(
        [project / "run", "setup", "--wheels", "wheels"],
        cwd=project,
        env=bare_environment(project),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (project / ".venv/pyvenv.cfg").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return started


def test_an_interrupted_set_up_is_made_anew(project):
    venv = project / ".venv"
    killed = half_set_up(project)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (venv / "half-unpacked").touch()

    set_up(project)
    assert not (venv / "half-unpacked").exists()
    assert holds(project, "import alpha; print(alpha.version)") == "1.0\n"

    (venv / "bin/python").unlink()  # or its Python was taken away
    done = start(project, "predict")
    assert done.returncode == 1  # it tries, but not without the wheels
    assert "setup.log" in done.stderr
    assert not (venv / ".setup-done").exists()


def test_ctrl_c_during_set_up_is_no_failure(project):
    started = half_set_up(project)
    os.killpg(started.pid, signal.SIGINT)  # the terminal sends it to all of them
    _, told = started.communicate(timeout=60)
    assert started.returncode == 130
    assert told.splitlines()[-1] == "Interrupted. The same command resumes the set-up."
    assert "setup.log" not in told
    set_up(project)
    assert holds(project, "import alpha; print(alpha.version)") == "1.0\n"


SLOW_BUILD = """
import os, time
from pathlib import Path

def build_wheel(*args, **options):
    Path({mark!r}).write_text(str(os.getpid()))
    time.sleep(60)

prepare_metadata_for_build_wheel = build_wheel
"""


def runs(process):
    """Whether a process runs, and does not just wait for its parent process to ask for its end."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
)
def test_a_set_up_that_is_ended_takes_its_installer_with_it(project, tmp_path, number, status):
    """The signal comes to `run` alone, while pip waits for the build of a package."""
    mark = tmp_path / "build"
    source = tmp_path / "gamma-1.0"
    source.mkdir()
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: gamma\nVersion: 1.0\n")
    (source / "slow.py").write_text(SLOW_BUILD.format(mark=str(mark)))
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "slow"\nbackend-path = ["."]\n'
    )
    archive = project / "wheels/gamma-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(source, "gamma-1.0")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with (project / "requirements.lock").open("a") as lock:
        lock.write(f"gamma==1.0 \\\n    --hash=sha256:{digest}\n")

    started = half_set_up(project)
    deadline = time.monotonic() + 120
    while not (mark.exists() and mark.read_text()):
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    build = Path(f"/proc/{mark.read_text()}")
    installer = Path(f"/proc/{build.joinpath('stat').read_text().split()[3]}")
    assert b"pip" in (installer / "cmdline").read_bytes()
    deadline = time.monotonic() + 60
    started.send_signal(number)
    _, told = started.communicate(timeout=60)
    assert started.returncode == status
    while any(map(runs, (installer, build))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number != signal.SIGKILL:
        assert told.splitlines()[-1] == "Interrupted. The same command resumes the set-up."


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


# ---- A Python that holds NeMo, as in NVIDIA's containers ---------------------------------------


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
    lender = container(project, "2.7.0rc1", "0.15.2").parents[1]
    (packages,) = lender.glob("lib/python3*/site-packages")
    write_wheel(lender, "megakit", "1.0")
    with zipfile.ZipFile(lender / "megakit-1.0-py3-none-any.whl") as theirs:
        theirs.extractall(packages)
    done = start(project, "setup", "--venv", lender, PIP_FIND_LINKS="others")
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


@pytest.mark.long
def test_a_python_with_another_nemo_is_named_and_left_alone(project):
    messages = set_up(project, python=container(project, "2.5.0", "0.13.1"))
    assert "holds NeMo 2.5.0 and Megatron-Core 0.13.1. This project needs 2.7 and 0.15" in messages
    assert holds(project, "import importlib.util as u; print(u.find_spec('torch'))") == "None\n"
