"""Makes a new project from the tutorial; `./run new PATH` calls this script.

The project gets a copy of the tutorial's scripts, `megakit` as a wheel, and the files of
`project/`, which replace the tutorial's own.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from copier import run_copy

TEMPLATE = Path(__file__).resolve().parent
ROOT = TEMPLATE.parent
#: The tutorial's files that are copied to a project without changes.
SHARED = (
    *("run", "requirements.lock", "LICENSE", "mnist"),
    *("model_components.py", "model_pretrain.py", "model_finetune.py", "model_predict.py"),
    *("tests/scripts.py", "tests/single_process.py"),
)
IGNORED = shutil.ignore_patterns("__pycache__")


def build_wheel(folder: Path, scratch: Path) -> Path:
    """Builds megakit's wheel into a folder; returns its path."""
    # Built from a copy, because setuptools creates a folder `build` in the source folder.
    shutil.copytree(ROOT / "megakit", scratch / "megakit", ignore=IGNORED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, scratch)
    # Uses the setuptools of this environment, which the lock pins, so no network is needed.
    command = [sys.executable, "-I", "-m", "pip", "wheel", "--wheel-dir", str(folder)]
    command += ["--no-deps", "--no-build-isolation", "--no-index", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"run: megakit's wheel could not be built:\n{done.stdout}{done.stderr}")
    (wheel,) = folder.glob("megakit-*.whl")
    return wheel


def project_name(path: Path) -> str:
    """Converts the folder's name to a valid project name for pyproject.toml."""
    name = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")
    # pip and uv would confuse a project named megakit with the library.
    return name if name and name != "megakit" else "my-model"


def make(project: Path, path: Path, scratch: Path) -> None:
    """Makes the project in the folder `project`; `path`, its later path, determines its name."""
    wheel = build_wheel(project / "wheels", scratch)
    version = wheel.name.split("-")[1]
    answers = {"name": project_name(path), "megakit_version": version}
    run_copy(str(TEMPLATE), project, data=answers, defaults=True, quiet=True)
    for name in SHARED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, project / name, ignore=IGNORED)
        else:
            shutil.copy(ROOT / name, project / name)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with (project / "requirements.lock").open("a") as lock:
        lock.write(f"megakit=={version} \\\n    --hash=sha256:{digest}\n")


def main() -> None:
    """Makes the project in a temporary folder, and copies it to the command line's path."""
    path = Path(sys.argv[1])
    with TemporaryDirectory() as folder:
        project, scratch = Path(folder, "project"), Path(folder, "megakit")
        project.mkdir()
        make(project, path, scratch)
        try:
            shutil.copytree(project, path, dirs_exist_ok=True)
        except OSError as error:
            sys.exit(f"run: {path} could not be written: {error}")


if __name__ == "__main__":
    main()
