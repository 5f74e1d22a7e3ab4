"""Narrow models compute in one thread, unless the user says otherwise."""

import os

import pytest

from megakit.runtime.threads import limit_threads


@pytest.mark.parametrize(
    ("width", "given", "expected"),
    [(64, None, "1"), (64, "2", "2"), (4096, None, None), (4096, "3", "3")],
)
def test_threads(monkeypatch, width, given, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    limit_threads(width)
    assert os.environ.get("OMP_NUM_THREADS") == expected
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
