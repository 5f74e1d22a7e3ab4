"""Stand-ins for packages that the frameworks import and this program does not use."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megakit.runtime import deferred_imports
from megakit.runtime.deferred_imports import unused_packages_deferred
from megakit.testing import Ranks
from tests.parallel import jobs

#: What a training does not use; sympy is a package of torch's compiler.
UNUSED = {*deferred_imports.PACKAGES, "sympy"}

#: As torch and Lightning import classes: for annotations, checks and calls.
IMPORTER = """
from typing import Optional
import heavy.part
from heavy.part import Thing

def use(thing: Thing | None, other: Optional[Thing] = None) -> "Thing | None":
    return thing if isinstance(thing, Thing) else None

def either(thing: object) -> bool:
    return isinstance(thing, int | Thing)

def make() -> Thing:
    return Thing()
"""


@pytest.fixture(autouse=True)
def heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "heavy" / "part").mkdir(parents=True)
    (tmp_path / "heavy" / "part" / "__init__.py").write_text("class Thing: ...\n")
    (tmp_path / "importer.py").write_text(IMPORTER)
    (tmp_path / "user.py").write_text("from heavy.part import Thing\nclass More(Thing): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(deferred_imports, "PACKAGES", ("heavy",))
    monkeypatch.delenv("MEGAKIT_STOCK", raising=False)
    yield
    for name in {"heavy", "heavy.part", "importer", "user"} & sys.modules.keys():
        del sys.modules[name]


def test_a_deferred_package_is_imported_when_a_class_is_used() -> None:
    with unused_packages_deferred():
        importer = importlib.import_module("importer")
    assert importer.use(1) is None
    assert [*map(importer.either, (1, ""))] == [True, False]
    assert not {"heavy", "heavy.part"} & sys.modules.keys()
    thing = importer.make()
    assert type(thing).__module__ == "heavy.part"
    assert importer.use(thing) is thing
    assert [*map(importer.either, (thing, ""))] == [True, False]
    with mock.patch.object(sys, "meta_path", [finder := mock.Mock()]):
        assert importer.use(1) is None
    assert not finder.mock_calls, "each use searches for a module"
    assert importer.heavy.part.Thing is type(thing)


def test_a_class_that_is_used_during_the_imports() -> None:
    with unused_packages_deferred():
        importer = importlib.import_module("importer")
        user = importlib.import_module("user")  # as a base class
        from heavy.part import Thing  # type: ignore[import-not-found]

    assert user.More.__bases__ == (Thing,)
    assert importer.use(user.More())
    assert vars(sys.modules["heavy"])["part"] is sys.modules["heavy.part"]


def imported_by_a_training(folder: Path) -> list[str]:
    jobs.pretrain(jobs.layout(), folder, 2)
    return sorted(UNUSED & sys.modules.keys())


def test_a_training_imports_none_of_the_deferred_packages(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(imported_by_a_training, tmp_path, world_size=1) == [[]]
