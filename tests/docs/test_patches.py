"""The patches of the frameworks: one list, which a command prints, and nothing beside it."""

import json
import re
from pathlib import Path

import pytest

from tests.scripts import output_of, run_python

pytestmark = pytest.mark.long
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
print(json.dumps(sorted(found)))
"""

#: What megakit assigns to modules of the frameworks in a training, past `patch`.
ASSIGNED = """
import json, sys, types
from pathlib import Path
from megakit.runtime import use_accelerator

use_accelerator("cpu")
import model_pretrain
from tests.parallel import jobs

found = set()

class Watched(types.ModuleType):
    def __setattr__(self, name, value):
        file = Path(sys._getframe(1).f_code.co_filename)
        if "megakit" in file.parts and file.name != "patching.py":
            found.add(f"{file.name}: {self.__name__}.{name}")
        super().__setattr__(name, value)

for name, module in list(sys.modules.items()):
    if name.split(".")[0] in FRAMEWORKS and type(module) is types.ModuleType:
        module.__class__ = Watched
jobs.pretrain(jobs.layout(), Path(FOLDER), 2)
print(json.dumps(sorted(found)))
"""


def test_the_command_prints_every_replaced_function() -> None:
    code = f"FRAMEWORKS = {FRAMEWORKS}\n{UNLISTED}"
    *table, unlisted = output_of(code, MEGAKIT_STOCK=None).strip().splitlines()
    assert len(table) > 40
    groups = [re.split(r" *\| *", line)[1] for line in table[2:]]
    assert groups == sorted(groups, key=("needed", "safe", "fast").index)
    assert {*groups} == {"needed", "safe", "fast"}
    assert json.loads(unlisted) == []


def test_a_training_assigns_to_no_module_of_the_frameworks_by_other_ways(tmp_path: Path) -> None:
    code = f"FRAMEWORKS, FOLDER = {FRAMEWORKS}, {str(tmp_path)!r}\n{ASSIGNED}"
    assert json.loads(output_of(code).strip().splitlines()[-1]) == []


def test_the_switch_leaves_out_what_is_only_fast() -> None:
    table = run_python("-m", "megakit.runtime", MEGAKIT_STOCK="1").output()
    assert [f"| {group} |" in table for group in ("needed", "safe", "fast")] == [True, True, False]
