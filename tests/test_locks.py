"""The locks: of one mind, whole, and for every Python and processor of the project."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.scripts import REPOSITORY

COPY = REPOSITORY / "template/common/requirements-dev.lock"
LOCKS = (REPOSITORY / "requirements.lock", REPOSITORY / "requirements-dev.lock", COPY)
WITHOUT_NEMO = tuple(REPOSITORY / "template/megatron" / lock.name for lock in LOCKS[:2])
MACHINES = [(f"3.{minor}", cpu) for minor in (11, 12, 13) for cpu in ("x86_64", "aarch64")]
PIN = re.compile(r"^([^\s#][^\\\n]*?) *((?:\\\n +--hash=\S+ *)+)$", re.MULTILINE)


def installed(lock: Path, python: str, processor: str) -> dict[str, tuple[str, str]]:
    """The version and the hashes of each package that a lock installs on such a machine."""
    environment = {"python_version": python, "python_full_version": f"{python}.2"}
    environment |= {"sys_platform": "linux", "platform_machine": processor}
    pins = [(Requirement(pin), hashes) for pin, hashes in PIN.findall(lock.read_text())]
    return {
        canonicalize_name(pin.name): (str(pin.specifier), hashes)
        for pin, hashes in pins
        if pin.marker is None or pin.marker.evaluate(environment)
    }


@pytest.mark.parametrize(("python", "processor"), MACHINES)
def test_the_locks_agree_and_have_what_pyproject_asks_for(python: str, processor: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    tutorial, dev, copy = (installed(lock, python, processor) for lock in LOCKS)
    assert {name: dev[name] for name in tutorial if name in dev}.items() <= tutorial.items()
    assert copy.items() <= dev.items()
    groups = project["dependency-groups"]
    assert {canonicalize_name(Requirement(line).name) for line in groups["copy"]} <= copy.keys()
    own = (line for line in groups["dev"] if isinstance(line, str))
    for line in (*project["project"]["dependencies"], *groups["copy"], *own):
        asked = Requirement(line)
        version, _ = {**tutorial, **dev}[canonicalize_name(asked.name)]
        assert asked.specifier.contains(version.removeprefix("==")), line
    assert tutorial["numpy"][0].startswith("==2." if python == "3.13" else "==1.26.")


@pytest.mark.parametrize(("python", "processor"), MACHINES[2:])
def test_the_locks_without_nemo_have_what_their_sources_ask_for(
    python: str, processor: str
) -> None:
    groups = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["dependency-groups"]
    first, dev = (installed(lock, python, processor) for lock in WITHOUT_NEMO)
    assert {name: dev[name] for name in first if name in dev}.items() <= first.items()
    for line in WITHOUT_NEMO[0].with_suffix(".in").read_text().splitlines():
        pin = Requirement(line.partition("#")[0] or "numpy")
        assert pin.specifier.contains(first[pin.name][0].removeprefix("=="))
    tools = [Requirement(one).name for one in groups["copy"]] + groups["copy-megatron"][1:]
    assert {*tools} <= dev.keys()
    assert dev["uv"] == installed(COPY, python, processor)["uv"]  # a copy takes over .venv/.uv
    assert not [name for name in first if re.search("nemo|lightning|scikit", name)]


def test_the_locks_are_whole() -> None:
    """Each package has a hash, each comes from the index, and no index is named."""
    for lock in (*LOCKS, *WITHOUT_NEMO):
        assert PIN.sub("", lock.read_text()).strip() == ""
        assert "://" not in lock.read_text()
