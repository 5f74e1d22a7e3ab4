"""Settings of Python and the system; whole scripts under them are in test_bad_environment.py."""

import os
import resource
import sys
import warnings

import pytest

from megakit.runtime.interpreter import ADDRESS_SPACE, adapt_interpreter, find_limits


@pytest.mark.parametrize("action", ["error", "ignore"])
def test_a_warning_is_no_error_here_nor_in_child_processes(
    monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """What else the user wants of warnings stays."""
    monkeypatch.setenv("PYTHONWARNINGS", action)
    monkeypatch.setattr(sys, "warnoptions", [action])
    with warnings.catch_warnings():
        warnings.simplefilter(action)  # type: ignore[arg-type]
        adapt_interpreter()
        if action == "error":
            with pytest.warns(UserWarning, match="harmless"):
                warnings.warn("harmless", stacklevel=1)
    left = [] if action == "error" else ["ignore"]
    assert sys.warnoptions == left
    assert [os.environ[name] for name in ("PYTHONWARNINGS",) if name in os.environ] == left


@pytest.mark.parametrize(
    ("files", "space", "named"),
    [
        (144, ADDRESS_SPACE, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
        (143, ADDRESS_SPACE, ["ulimit -n 143"]),
        (144, ADDRESS_SPACE - 1, ["ulimit -v 4718591"]),
        (0, 0, ["ulimit -n 0", "ulimit -v 0"]),
    ],
)
def test_limits(monkeypatch: pytest.MonkeyPatch, files: int, space: int, named: list[str]) -> None:
    """Of files the hard limit counts, as `adapt_interpreter` raises the other one to it."""
    limits = {resource.RLIMIT_NOFILE: (32, files), resource.RLIMIT_AS: (space, -1)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert [problem.split(":")[0] for problem in find_limits(1)] == named
