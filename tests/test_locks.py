"""The locks: of one mind, whole, and for every Python and processor that the project is for."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.scripts import REPOSITORY

LOCKS = [REPOSITORY / "requirements.lock", *sorted(REPOSITORY.glob("locks/*.lock"))]
PYTHONS = ("3.11", "3.12", "3.13")
PROCESSORS = ("x86_64", "aarch64")
#: They come as source everywhere, and set-up builds them.
SOURCES = ("wget", "antlr4-python3-runtime")


def entries(lock: Path) -> list[tuple[Requirement, frozenset[str]]]:
    """Each pin of a lock, with its hashes."""
    pins = re.findall(r"^([^\s#][^\\\n]*?) *((?:\\\n +--hash=\S+ *)+)$", lock.read_text(), re.M)
    return [(Requirement(pin), frozenset(re.findall(r"--hash=(\S+)", text))) for pin, text in pins]


def installed(lock: Path, python: str, processor: str) -> dict[str, tuple[str, frozenset[str]]]:
    """What a lock installs on such a machine: the version and the hashes of each package."""
    environment = {"python_version": python, "python_full_version": f"{python}.2"}
    environment |= {"sys_platform": "linux", "platform_machine": processor}
    return {
        canonicalize_name(pin.name): (str(pin.specifier), hashes)
        for pin, hashes in entries(lock)
        if pin.marker is None or pin.marker.evaluate(environment)
    }


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("python", PYTHONS)
def test_all_locks_agree(python: str, processor: str) -> None:
    together: dict[str, tuple[str, frozenset[str]]] = {}
    for lock in LOCKS:
        for name, pin in installed(lock, python, processor).items():
            assert together.setdefault(name, pin) == pin, f"{lock.name}: {name}"
    numpy = together["numpy"][0]
    assert numpy.startswith("==2." if python == "3.13" else "==1.26.")


@pytest.mark.parametrize("python", PYTHONS)
def test_each_lock_has_what_its_list_asks_for(python: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    lists = {"requirements": project["project"]["dependencies"], **project["dependency-groups"]}
    assert {lock.stem for lock in LOCKS} == set(lists)
    for lock in LOCKS:
        pins = installed(lock, python, "x86_64")
        for line in lists[lock.stem]:
            asked = Requirement(line)
            version = pins[canonicalize_name(asked.name)][0].removeprefix("==")
            assert asked.specifier.contains(version), f"{lock.name}: {line}"


@pytest.mark.long
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("python", PYTHONS)
def test_there_is_a_wheel_for_every_machine(tmp_path: Path, python: str, processor: str) -> None:
    """uv looks in the index, and downloads nothing."""
    command: list[str | Path] = [Path(sys.prefix, "bin/uv"), "--directory", tmp_path]
    command += ["pip", "install", "--dry-run"]
    command += ["--no-deps", "--require-hashes", "--target", tmp_path, "--only-binary", ":all:"]
    for name in SOURCES:
        command += ["--no-binary", name]
    command += ["--python-version", python, "--python-platform", f"{processor}-manylinux_2_28"]
    for lock in LOCKS:
        command += ["--requirement", lock]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "dns error" in done.stderr or "Connect" in done.stderr:
        pytest.skip("the index of packages can't be reached")
    assert done.returncode == 0, done.stderr
    count = len(set().union(*(installed(lock, python, processor) for lock in LOCKS)))
    assert f"Would install {count} packages" in done.stderr
