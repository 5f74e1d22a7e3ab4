"""What the suite itself promises: a limit of time for each test, and draws that can be repeated."""

import re
from pathlib import Path

from tests.scripts import REPOSITORY, run_python

# Some packages install a package `tests`, too.
CONFTEST = f"""
import sys, types

tests = sys.modules["tests"] = types.ModuleType("tests")
tests.__path__ = [{str(REPOSITORY / "tests")!r}]
from tests.conftest import *
"""
SLOW = """
import subprocess
from tests import conftest

conftest.LIMITS = {"": 1}

def test_waits():
    subprocess.run(["sleep", "47"])

def test_next():
    pass
"""
DRAWS = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=3, database=None)
@given(st.integers(0, 10**9))
def test_draws(number):
    print(f"<{number}>", end="")

def test_fails():
    assert False
"""
MARKED = """
import pytest

def test_plain(): assert False

@pytest.mark.long
def test_long(): pass

@pytest.mark.platform
def test_dear(): pass

@pytest.mark.platform
@pytest.mark.long
def test_cheap(): pass
"""


def pytest_in(folder: Path, code: str, *more: str, status: int = 1, **changes: str) -> str:
    """The output of pytest with the suite's conftest.py on one file."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(code)
    options = ("-p", "no:cacheprovider", "-rA", "-q", "-c", REPOSITORY / "pyproject.toml")
    done = run_python("-m", "pytest", *options, *more, folder, cwd=folder, timeout=60, **changes)
    assert done.status == status, done.out + done.err
    return done.out


def test_a_test_that_hangs_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    told = pytest_in(tmp_path, SLOW)
    assert re.search(r"Failed: \S*test_it\.py::test_waits takes longer than 1 s", told)
    assert "1 failed, 1 passed" in told


def test_the_seed_that_is_shown_repeats_what_was_drawn(tmp_path: Path) -> None:
    first = pytest_in(tmp_path, DRAWS)
    seed = re.findall(r"HYPOTHESIS_SEED=(\d+) repeats", first)[-1]
    again = pytest_in(tmp_path, DRAWS, HYPOTHESIS_SEED=seed)
    drawn = [re.findall(r"<\d+>", told) for told in (first, again)]
    assert drawn[0] == drawn[1] != []


def test_tests_of_platforms_run_when_asked_for_and_the_cheap_ones_with_all(tmp_path: Path) -> None:
    for options, expected in (
        ([], set()),
        (["--all"], {"long", "cheap"}),
        (["-m", "platform"], {"dear", "cheap"}),
    ):
        status = 0 if "-m" in options else 1  # test_plain fails, where it runs
        told = pytest_in(tmp_path, MARKED, *options, status=status)
        assert set(re.findall(r"PASSED \S+::test_(\w+)", told)) == expected
