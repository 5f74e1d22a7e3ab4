"""The patches of the frameworks: one list, which the page shows, and nothing beside it."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import REPOSITORY, output_of, run_python

LIBRARY = [
    path
    for path in (REPOSITORY / "megakit").rglob("*.py")
    if path.name != "patching.py" and "testing" not in path.parts
]
FRAMEWORKS = {"torch", "lightning", "nemo", "megatron", "numpy", "torchmetrics"}

#: Functions of megakit that are found in modules and classes of the frameworks, and are not listed.
UNLISTED = """
import json, pkgutil, runpy, sys
runpy.run_module("megakit.runtime", run_name="__main__")
from megakit.runtime.patching import PATCHES

listed, found = {}, set()
for one in PATCHES:
    owner = sys.modules.get(one.owner) or pkgutil.resolve_name(one.owner)
    values = vars(owner).values() if not one.name else [getattr(owner, one.name, None)]
    listed |= {id(value): value for value in values}
for module in [module for name, module in sys.modules.items() if name.split(".")[0] in FRAMEWORKS]:
    owners = [module, *(v for v in vars(module).values() if issubclass(type(v), type))]
    for owner in owners:
        if str(vars(owner).get("__module__")).startswith("megakit"):
            continue  # a class of megakit's that a framework's module names
        for name, value in list(vars(owner).items()):
            if type(value) in (staticmethod, classmethod):
                value = value.__func__
            is_function = type(value) is type(json.dumps)
            if is_function and "/megakit/" in value.__code__.co_filename:
                found |= set() if id(value) in listed else {f"{owner.__name__}.{name}"}
print(json.dumps([sorted(found), [one.name for one in PATCHES]]))
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    code = f"FRAMEWORKS = {FRAMEWORKS}\n{UNLISTED}"
    return output_of(code, MEGAKIT_STOCK=None).strip().splitlines()


def test_the_page_shows_what_the_command_prints(printed: list[str]) -> None:
    page = (REPOSITORY / "docs" / "patches.md").read_text()
    assert "\n".join(printed[:-1]) in page
    groups = [re.split(r" *\| *", line)[1] for line in printed[2:-1]]
    assert groups == sorted(groups, key=("needed", "safe", "fast").index)
    assert {*groups} == {"needed", "safe", "fast"}


def test_every_function_in_the_place_of_another_is_listed(printed: list[str]) -> None:
    unlisted, names = json.loads(printed[-1])
    assert unlisted == []
    named = {
        argument.value
        for path in LIBRARY
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) in ("patch", "_patch")
        for each in call.args
        for argument in getattr(getattr(each, "value", each), "elts", [each])
        if isinstance(argument, ast.Constant)
    }
    assert named <= {*names}, "megakit/runtime/__main__.py names each function that makes patches"


def test_the_switch_leaves_out_what_is_only_fast() -> None:
    table = run_python("-m", "megakit.runtime", MEGAKIT_STOCK="1").output()
    assert "| needed |" in table
    assert "| safe |" in table
    assert "| fast |" not in table


def assigned(path: Path, tree: ast.AST) -> list[str]:
    """Where a file sets an attribute of something that it imports from the frameworks."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] in FRAMEWORKS
    }
    found = []
    for node in ast.walk(tree):
        targets: list[Any] = []
        if isinstance(node, ast.Assign):
            targets = [t for t in node.targets if isinstance(t, ast.Attribute)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "setattr":
            targets = [node.args[0]]
        for target in targets:
            if ast.unparse(target).startswith("torch.backends."):
                continue  # torch's settings
            while isinstance(target, ast.Attribute):
                target = target.value
            if isinstance(target, ast.Name) and target.id in imported:
                found.append(f"{path.name}:{target.lineno}")
    return found


def test_no_file_sets_an_attribute_of_the_frameworks_itself() -> None:
    found = [place for path in LIBRARY for place in assigned(path, ast.parse(path.read_text()))]
    assert found == []


@pytest.mark.parametrize("line", ["torch.cuda.Event = None", "setattr(loops.Loop, 'run', None)"])
def test_such_a_line_is_noticed(line: str) -> None:
    tree = ast.parse(f"import torch.cuda\nfrom lightning.pytorch import loops\n{line}")
    assert assigned(Path("x.py"), tree) == ["x.py:3"]
