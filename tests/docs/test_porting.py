"""docs/porting.md: its imports work, and its tables are what the source says today."""

import ast
import importlib
import re

import pytest

from tests.scripts import REPOSITORY

PAGE = REPOSITORY / "docs" / "porting.md"
RIGHT = [row.split("|")[2] for row in PAGE.read_text().splitlines() if row.startswith("| ")]
IMPORTS = sorted(
    {code for cell in RIGHT for code in re.findall(r"`((?:from|import) [^`]+)`", cell)}
)


def test_imports_are_found():
    assert len(IMPORTS) > 15


@pytest.mark.parametrize("code", IMPORTS)
def test_imports_work(code):
    from megakit.runtime import use_accelerator

    use_accelerator("cpu")
    names: dict[str, object] = {}
    exec(code, names)
    (statement,) = ast.parse(code).body
    assert isinstance(statement, ast.Import | ast.ImportFrom)
    for alias in statement.names:
        assert names[alias.asname or alias.name] is not None


def test_tables_are_up_to_date(dependence):
    assert dependence.text() in PAGE.read_text(), "renew: python benchmarks/dependence.py --write"


def test_uses_are_counted(dependence, tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        "from nemo.lightning import io\n"
        "from megatron.core.transformer import MegatronModule\n"
        "import lightning.pytorch as pl\n"
        "import torch\n"
        "class A(io.IOMixin): ...\n"
        "class B(MegatronModule, pl.Callback): ...\n"
        "def c():\n"
        "    from nemo import lightning as nl\n"
        "    return nl.Trainer()\n"
        "def d(): return torch\n"
    )
    assert dict(dependence.definitions(module)) == {
        "A": {"nemo": {"io.IOMixin"}},
        "B": {"megatron": {"MegatronModule"}, "lightning": {"pytorch.Callback"}},
        "c": {"nemo": {"lightning.Trainer"}},
        "d": {},
    }


@pytest.fixture
def dependence(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("dependence")
