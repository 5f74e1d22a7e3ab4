"""The table of foreign systems: its rows, and what it says of those that can't be made here."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

from tests.benchmarks.conftest import BENCHMARKS
from tests.scripts import REPOSITORY

sys.path.insert(0, str(BENCHMARKS))  # the rows' names are needed before any fixture
import platform_rows
import platforms
import systems

sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def bench():
    """What all rows share: the clones of this machine's Pythons, and their cache."""
    places = (REPOSITORY / "data", REPOSITORY.parent / "shared/data")
    data_dir = next((place for place in places if (place / "MNIST/raw").is_dir()), places[0])
    # Not pytest's folder, which is closed to others than its owner.
    with platforms.bench_in(None, data_dir) as made:
        yield made


@pytest.fixture
def here(tmp_path_factory):
    with platforms.bench_in(None, Path("none")) as made:
        yield made.here


@pytest.mark.platform
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if row.cheap else ())
        for name, row in platforms.ROWS.items()
    ],
)
def test_readmes_commands_work_on(name, bench):
    result = platforms.run_row(bench, name)
    if result.state == "cannot":
        pytest.skip(result.done.told)
    assert result.state == "passed", result.done.told


def test_commands_run_as_an_ordinary_user_without_our_environment(here, monkeypatch):
    monkeypatch.setenv("VENV", "/ours")
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    told = here.run('id -u; pwd; echo "${VENV:-none} $https_proxy"; touch written')
    user, folder, environment = told.splitlines()
    assert int(user) != 0
    assert folder == str(here.home)
    assert environment == "none http://proxy.example"


def test_a_command_that_fails_tells_its_last_lines(here):
    with pytest.raises(systems.Failed, match="exit status 3: because"):
        here.run("echo because; exit 3")


def _commands_of_processes() -> set[bytes]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # a process that ended meanwhile
            found.add(file.read_bytes())
    return found


@pytest.mark.skipif(not systems.IS_ROOT, reason="mounts need root")
def test_a_lent_folder_is_seen_in_a_closed_home_and_processes_end(here, monkeypatch):
    closed = here.home.parent / "closed"
    (closed / "lent").mkdir(parents=True)
    (closed / "lent/file").touch()
    closed.chmod(0o700)
    with pytest.raises(systems.Failed, match="Permission denied"):
        here.run(f"ls {closed}/lent")
    monkeypatch.setenv("HOME", str(closed))
    here.lent.add(closed / "lent")
    seconds = 3600 + os.getpid() / 1e7  # of this test's own sleep
    assert here.run(f"sleep {seconds} >/dev/null & ls {closed}/lent").split() == ["file"]
    assert not any(str(seconds).encode() in command for command in _commands_of_processes())
    assert str(here.home.parent) not in Path("/proc/mounts").read_text()


def test_what_a_row_comes_to_is_told_in_the_table(monkeypatch):
    def cannot(bench, folder):
        raise systems.Cannot("this machine has no buildah")

    def fails(bench, folder):
        raise ValueError("two | lines\nof it")

    def passes(bench, folder):
        assert folder.is_dir()
        return platform_rows.Done("3.11.2", 65.3, "300 rows, 94.00%")

    rows = {
        make.__name__: platforms.Row("a system", "commands", make)
        for make in (cannot, fails, passes)
    }
    monkeypatch.setattr(platforms, "ROWS", rows)
    monkeypatch.setattr(platform_rows.Bench, "need_network", lambda _: None)
    with platforms.bench_in(None, Path("none")) as bench:
        told = [str(platforms.run_row(bench, name)) for name in rows]
        assert [path.name for path in bench.work.iterdir()] == ["files"]
    assert not bench.work.exists()
    assert told == [
        "| a system |  | commands |  | not here: this machine has no buildah |",
        "| a system |  | commands |  | **failed**: ValueError: two / lines of it |",
        "| a system | 3.11.2 | commands | 65 | 300 rows, 94.00% |",
    ]


def test_a_missing_program_is_named():
    with pytest.raises(systems.Cannot, match="has no no-such-program"):
        systems.need("bash", "no-such-program")
