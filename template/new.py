"""`./run new PATH [OPTION ...]`: makes a project from the tutorial or an example.

The project gets the scripts and what they import, `megakit` as a wheel, the files of `common/`, and
those of `tutorial/` or of the example's folder here.
"""

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megakit import __version__
from template.sources import (
    EXAMPLES,
    IN_FILES,
    LIBRARY,
    NO_NEMO,
    ROOT,
    TEMPLATE,
    WITHOUT_NEMO,
    Rules,
    adapted,
    copy_library,
    copy_sources,
)

#: Files that are copied to every project without changes.
SHARED = ("run", "run_setup.sh", "requirements.lock", "LICENSE")
ORIGINS = sorted(path.name for path in EXAMPLES.glob("[!_]*") if (TEMPLATE / path.name).is_dir())
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
HELP = f"""\
usage: ./run new PATH [--from NAME | --pictures] [--venv DIR]

Creates a project of your own in the folder PATH: the scripts, a test suite, and
megakit as a wheel.

  --from NAME  Make the project from an example instead of the tutorial:
               {", ".join(ORIGINS)}; megatron is the tutorial's
               chain without NeMo and Lightning.
  --pictures   Copy the tutorial's pictures, too: those of a prediction, and those
               in TensorBoard.
  --venv DIR   Use the packages of this environment, and download none.
"""


def refuse(message: str) -> NoReturn:
    """Ends the program with a message about an error that the user can correct."""
    print(f"run: {message}", file=sys.stderr)
    sys.exit(2)


def parse(arguments: list[str]) -> tuple[Path, str | None, str, bool]:
    """Returns the project's folder, the environment whose packages it is to use, and its origin.

    The origin is the name of an example, or `tutorial`. The last value tells whether the project
    gets the tutorial's pictures.
    """
    path, venv, origin, has_pictures = "", None, "tutorial", False
    while arguments:
        argument = arguments.pop(0)
        if argument in ("-h", "--help"):
            print(HELP, end="")
            sys.exit()
        elif argument == "--venv":
            venv = arguments.pop(0) if arguments else ""
            if not venv:
                refuse("new --venv takes a folder")
        elif argument == "--from":
            origin = arguments.pop(0) if arguments else ""
            if origin not in ORIGINS:
                refuse(f"new --from takes an example: {', '.join(ORIGINS)}; not '{origin}'")
        elif argument == "--pictures":
            has_pictures = True
        elif argument.startswith("-"):
            refuse(f"new takes PATH, --from NAME, --pictures and --venv DIR, not {argument}")
        elif path:
            refuse(f"new takes one PATH, not also {argument}")
        else:
            path = argument
    if not path:
        refuse("new needs the folder to create: ./run new ../my-model")
    if has_pictures and origin != "tutorial":
        refuse(f"new --pictures: {origin} has none; leave the option out")
    return Path(os.path.realpath(path)), venv, origin, has_pictures


def build_wheel(project: Path, scratch: Path, origin: str) -> Path:
    """Builds megakit's wheel into a project's folder; returns its path."""
    folder = project / "wheels"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, scratch)
    # Built from a copy, because setuptools creates a folder `build` in the source folder.
    if origin == WITHOUT_NEMO:
        copy_library(project, scratch)
        adapt(scratch / "pyproject.toml", NO_NEMO)
    else:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(LIBRARY, scratch / LIBRARY.name, ignore=ignored)
    # Uses the setuptools of this environment, which the lock pins, so no network is needed.
    command = [sys.executable, "-I", "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"run: megakit's wheel could not be built:\n{done.stdout}{done.stderr}")
    (wheel,) = folder.glob("megakit-*.whl")
    return wheel


def adapt(file: Path, rules: dict[str, Rules]) -> None:
    """Applies the rules for a file to a copy of it."""
    file.write_text(adapted(file.name, file.read_text(), rules[file.name]))


def project_name(path: Path) -> str:
    """Converts the folder's name to a valid project name for pyproject.toml."""
    name = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")
    # uv would confuse a project named megakit with the library.
    return name if name and name != "megakit" else "my-model"


def make(project: Path, path: Path, scratch: Path, origin: str, has_pictures: bool) -> None:
    """Makes the project in the folder `project`; `path`, its later path, determines its name."""
    from copier import run_copy  # not at the top, so that --help and refusals are quick

    for name in SHARED:
        shutil.copy(ROOT / name, project)
    adapt(project / "run", IN_FILES)
    if origin == WITHOUT_NEMO:
        adapt(project / "run_setup.sh", NO_NEMO)
    answers = {"name": project_name(path), "megakit_version": __version__}
    for part in ("common", origin):
        data = {**answers, "part": part, "has_nemo": origin != WITHOUT_NEMO}
        # Some files of the origin replace the common ones.
        run_copy(str(TEMPLATE), project, data=data, defaults=True, quiet=True, overwrite=True)
    copy_sources(origin, project, has_pictures)
    wheel = build_wheel(project, scratch, origin)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with (project / "requirements.lock").open("a") as lock:
        lock.write(f"megakit=={__version__} \\\n    --hash=sha256:{digest}\n")


def remove(path: Path, created: list[Path]) -> None:
    """Empties the project's folder, and removes the folders that this program created."""
    for entry in path.glob("*"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    for folder in created:
        if folder.is_dir():
            folder.rmdir()


def main() -> None:
    """Makes the project in a temporary folder, copies it to its path, and sets it up if asked."""
    path, venv, origin, has_pictures = parse(sys.argv[1:])
    if path.is_relative_to(ROOT):
        refuse(f"new: {path} is inside this project; name a folder outside")
    created = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    if path not in created and (not path.is_dir() or any(path.glob("*"))):
        refuse(f"new: {path} exists and is not an empty folder; name another folder")
    with TemporaryDirectory() as folder:
        project, scratch = Path(folder, "project"), Path(folder, "megakit")
        project.mkdir()
        scratch.mkdir()
        make(project, path, scratch, origin, has_pictures)
        try:
            shutil.copytree(project, path, dirs_exist_ok=True)
        except OSError as error:
            remove(path, created)
            refuse(f"new: {path} cannot be written; name another folder: {error}")
    if venv:
        # Ctrl-C reaches the set-up, too, which ends with a message of its own.
        signal.signal(signal.SIGINT, lambda *_: None)
        kept = {name: os.environ[name] for name in os.environ.keys() - {"VENV", "PYTHON"}}
        command = [str(path / "run"), "setup", "--venv", venv]
        status = subprocess.run(command, env=kept, check=False).returncode
        if status:  # The same command is to work once the cause is corrected.
            remove(path, created)
            sys.exit(status if status > 0 else 128 - status)
    begin = f"cd {shlex.quote(str(path))} && ./run tests"
    print(f"Created {path}. To begin: {begin}", file=sys.stderr)


if __name__ == "__main__":
    main()
