"""The rows of `platforms.py`: each makes a system, runs commands in it, and reads the outcome."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from report import REPOSITORY
from slurm_here import slurm
from systems import (
    IS_ROOT,
    Cannot,
    Failed,
    System,
    call,
    debian,
    debian_root,
    emulated,
    need,
    need_root,
    owned,
    this_machine,
)

DEBIAN = ["python3", "python3-venv", "git", "ca-certificates"]
THIS_PYTHON = f"3.{sys.version_info.minor}"


@dataclass
class Done:
    """What a row's commands came to."""

    python: str
    seconds: float
    told: str


@dataclass
class Bench:
    """What the rows share.

    Attributes:
        work: Everything is made in this folder.
        files: In it, the repository and MNIST, if that is here.
        data: The tutorial's option for MNIST.
    """

    work: Path
    files: Path
    data: str = ""
    _reaches: bool | None = None
    _here: System | None = None
    _clones: dict[str, tuple[Path, Done]] = field(default_factory=dict)

    def need_network(self) -> None:
        """Refuses all rows where no package can be downloaded."""
        if self._reaches is None:
            command: list[str | Path] = [sys.executable, "-m", "pip", "--retries", "1", "download"]
            command += ["--no-deps", "uv"]
            done = subprocess.run([*command, "--dest", self.work / "pip"], capture_output=True)
            self._reaches = done.returncode == 0
        if not self._reaches:
            raise Cannot("no package can be downloaded")

    @property
    def here(self) -> System:
        """This machine, with one home and one cache for all rows."""
        self._here = self._here or this_machine(self.work / "here", self.files)
        return self._here

    def python(self, version: str) -> str:
        """The path of this machine's own Python of that version."""
        prefix = find_python(version)
        if IS_ROOT and prefix.is_relative_to(Path.home()):
            self.here.lent.add(prefix)
        return str(prefix / f"bin/python{version}")

    def clone(self, version: str) -> tuple[Path, Done]:
        """A clone on this machine, with that Python, in which the tutorial has run."""
        if version not in self._clones:
            clone = self.here.home / f"clone-{version}"
            done = readme(self.here, clone, self.data, PYTHON=self.python(version))
            self._clones[version] = clone, done
        return self._clones[version]


def find_python(version: str) -> Path:
    """The prefix of a Python on this machine that is no virtual environment."""
    pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}"))
    for path in [*pyenv, shutil.which(f"python{version}")]:
        if path is not None:
            code = "import sys; print(sys.base_prefix)"
            found = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True)
            if found.returncode == 0:
                return Path(found.stdout.strip())
    raise Cannot(f"this machine has no Python {version}")


def readme(system: System, clone: Path, data: str, **environment: str) -> Done:
    """README's two commands."""
    name, repository = system.inside(clone), system.inside(system.files / "repository")
    command = f"git clone -q {repository} {name} && cd {name} && ./run tutorial"
    data = data and f" --data-dir {system.inside(system.files / data)}"
    began = time.monotonic()
    system.run(command + data, **environment)
    return outcome(clone / "runs", time.monotonic() - began)


def outcome(runs: Path, seconds: float) -> Done:
    """What the prediction wrote."""
    summary = json.loads((runs / "predict/summary.json").read_text())
    rows = (runs / "predict/predictions.csv").read_text().count("\n") - 1
    if rows != summary["num_samples"]:
        raise Failed(f"{rows} rows, not {summary['num_samples']}")
    told = f"{rows:,} rows, {summary['accuracy']:.2%}"
    return Done(summary["versions"]["python"], seconds, told)


# ---- Rows --------------------------------------------------------------------------------------


def fresh_debian(suite: str) -> Callable[[Bench, Path], Done]:
    def row(bench: Bench, folder: Path) -> Done:
        system = debian(folder / "root", suite, DEBIAN, bench.files)
        clone = system.home / "mnist-megatron"
        done = readme(system, clone, bench.data)
        if "home = /usr/bin\n" not in (clone / ".venv/pyvenv.cfg").read_text():
            raise Failed("not with Debian's own Python")
        return done

    return row


def python_here(version: str) -> Callable[[Bench, Path], Done]:
    return lambda bench, _: bench.clone(version)[1]


def closed_home(bench: Bench, folder: Path) -> Done:
    home = folder / "home"
    home.mkdir()
    system = System(Path("/"), home, bench.files, bench.here.lent)
    python = bench.python(THIS_PYTHON)
    home.chmod(0o555)
    projects = folder / "projects"
    projects.mkdir()
    return readme(system, owned(projects) / "clone", bench.data, PYTHON=python)


def spaces(bench: Bench, folder: Path) -> Done:
    system = this_machine(folder / "a path with  spaces", bench.files)
    system.lent = bench.here.lent
    python = bench.python(THIS_PYTHON)
    cache = str(bench.here.home / ".cache/uv")  # the home is new; the packages need not be
    clone = system.home / "mnist & megatron's"
    return readme(system, clone, bench.data, PYTHON=python, UV_CACHE_DIR=cache)


def numpy_2(bench: Bench, folder: Path) -> Done:
    lender, _ = bench.clone("3.13")
    clone = bench.here.home / "borrows"
    here = bench.here.inside
    began = time.monotonic()
    bench.here.run(
        f"git clone -q {here(bench.files / 'repository')} {here(clone)} && cd {here(clone)}"
        f" && ./run setup --venv {here(lender / '.venv')} && ./run tutorial"
        + (bench.data and f" --data-dir {here(bench.files / bench.data)}")
        # Two processes save through the function of Megatron that wants an older numpy.
        + " && ./run pretrain --dataset digits --max-steps 20 --devices 2 --tensor-parallel 2"
        " --output-dir runs/two"
        " && .venv/bin/python -c 'import numpy; print(numpy.__version__)' > numpy"
    )
    done = outcome(clone / "runs", time.monotonic() - began)
    version = (clone / "numpy").read_text().strip()
    if not version.startswith("2."):
        raise Failed(f"numpy is {version}")
    done.told += f", numpy {version}"
    return done


def container(bench: Bench, folder: Path) -> Done:
    need_root()
    need("buildah", "mmdebstrap", "ip")
    places = ["--root", folder / "storage", "--runroot", folder / "run"]
    buildah = ["buildah", *places, "--storage-driver", "vfs"]
    base = call(*buildah, "from", "scratch").strip()
    root = Path(call(*buildah, "mount", base).strip())
    debian_root(root, "bookworm", ["python3", "python3-venv", "ca-certificates"])
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    call(*buildah, "config", "--env", path, base)
    call(*buildah, "commit", "--rm", base, "localhost/base")
    context = folder / "context"
    call("git", "clone", "-q", REPOSITORY, context)
    began = time.monotonic()
    chroot = ["--isolation", "chroot"]
    options = [*chroot, "--layers=false", "--network", "host", "--build-arg", "BASE=localhost/base"]
    call(*buildah, "bud", *options, "--tag", "localhost/megakit", context)
    built = time.monotonic() - began
    call(*buildah, "rmi", "localhost/base")
    workspace = folder / "workspace"
    workspace.mkdir()
    workspace.chmod(0o777)
    name = call(*buildah, "from", "localhost/megakit").strip()
    volumes = ["--volume", f"{workspace}:/workspace", "--volume", f"{bench.files}:/files:ro"]
    tutorial = ["/opt/megakit/run", "tutorial"]
    tutorial += ["--data-dir", f"/files/{bench.data}"] if bench.data else []
    run = [*buildah, "run", *chroot, "--user", "4242:4242", *volumes, name, "--", *tutorial]
    script = 'ip link set lo up; mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$@"'
    began = time.monotonic()
    call("unshare", "--mount", "--net", "bash", "-ec", script, "bash", *run)
    done = outcome(workspace / "runs", time.monotonic() - began)
    call(*buildah, "rm", "--all")
    done.told += f"; built in {built:.0f} s"
    return done


def aarch64(bench: Bench, folder: Path) -> Done:
    need_root()
    uv = Path(sys.prefix, ".uv/bin/uv")
    if not uv.exists():
        raise Cannot(f"{uv} is missing")
    with emulated("aarch64"):
        options = "--architectures=arm64"
        system = debian(folder / "root", "bookworm", DEBIAN, bench.files, options)
        clone = system.home / "mnist-megatron"
        name, repository = system.inside(clone), system.inside(system.files / "repository")
        system.run(f"git clone -q {repository} {name} && cd {name} && python3 -m venv .venv")
        (packages,) = clone.glob(".venv/lib/python3*/site-packages")
        target = ["--target", packages, "--python-version", packages.parent.name[6:]]
        target += ["--python-platform", "aarch64-manylinux_2_28"]
        lock = ["--requirements", clone / "requirements.lock", "--require-hashes", "--no-deps"]
        lock += ["--build-constraints", clone / "requirements.lock"]
        # From outside: the emulation would take over half an hour for it.
        # From /, where no project's settings count.
        at = ["--directory", "/", "--cache-dir", folder / "cache"]
        call(uv, *at, "pip", "install", "--python", sys.executable, *target, *lock)
        (clone / ".venv/.locks").mkdir()
        shutil.copy(clone / "requirements.lock", clone / ".venv/.locks")
        owned(clone)
        steps = "--dataset digits --max-steps 20"
        began = time.monotonic()
        system.run(
            f"cd {name} && ./run pretrain {steps} && ./run finetune {steps}"
            " && ./run predict --dataset digits"
        )
        return outcome(clone / "runs", time.monotonic() - began)


def slurm_job(bench: Bench, folder: Path) -> Done:
    need_root()
    clone, _ = bench.clone(THIS_PYTHON)
    data = bench.data and f"--data-dir {bench.files / bench.data}"
    if not data:
        data = "--dataset digits"
    with slurm(folder / "slurm", bench.here) as cluster:
        began = time.monotonic()
        runs = {name: clone / "runs" / name for name in ("whole", "limited")}
        cluster.run(clone, OPTIONS=f"{data} --output-dir {runs['whole']}")
        # Stopped after half of the time that it would take. Slurm's limits are minutes.
        half = (time.monotonic() - began) / 2
        minutes = int(half // 60) + 1
        limit = [f"--time={minutes}", f"--signal=B:USR1@{minutes * 60 - int(half)}"]
        requeued = cluster.run(clone, *limit, OPTIONS=f"{data} --output-dir {runs['limited']}")
    done = outcome(runs["limited"], time.monotonic() - began)
    if not requeued:
        raise Failed("the job was done before its time limit")
    for file in ("pretrain/metrics.csv", "finetune/metrics.csv", "predict/predictions.csv"):
        whole, limited = (folder.joinpath(file).read_bytes() for folder in runs.values())
        if whole != limited:
            raise Failed(f"{file} is not the uninterrupted job's")
    done.told += f"; restarts: {requeued}, metrics and predictions equal the uninterrupted job's"
    return done
