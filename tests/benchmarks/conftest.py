"""The benchmarks' modules, which find one another by the folder they are in."""

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.scripts import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports one of them by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
