"""The picture of one training step in docs/concepts.md shows the calls of a real training step."""

from __future__ import annotations

import re
import runpy
from typing import Any

from megakit.testing import Ranks
from tests.docs import fitting
from tests.scripts import REPOSITORY

PICTURE = REPOSITORY / "docs" / "images" / "training_step.svg"
SCRIPT = runpy.run_path(str(PICTURE.with_name("make_step.py")))
#: Depth, function, and whether it is called for each micro batch.
Row = tuple[int, str, bool]
ROWS: list[Row] = [
    (call.depth, call.function, call.repeated) for call in SCRIPT["CALLS"] if not call.is_stock
]
STOCK: list[str] = [call.function for call in SCRIPT["CALLS"] if call.is_stock]
MICRO_BATCHES = 2


def observe(functions: list[str], is_stock: bool = False) -> list[tuple[int, str]]:
    """Trains for one step; returns the calls of these functions in order, with their depth."""
    import importlib
    import os
    import sys

    os.environ["MEGAKIT_STOCK"] = str(int(is_stock))

    def code_of(function: str) -> Any:
        module, _, path = function.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        while hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        return found.__code__

    from model_components import BionemoLightningModule, PretrainConfig

    class Module(BionemoLightningModule):
        """A class of this training: NeMo patches the class of the module."""

    names = {code_of(function): function for function in functions}
    calls: list[tuple[int, str]] = []
    depth = 0

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal depth
        if frame.f_code in names and event in ("call", "return"):
            if event == "call":
                calls.append((depth, names[frame.f_code]))
            depth += 1 if event == "call" else -1

    layout = fitting.Layout(micro_batch=8, global_batch=16)
    module, data = Module(config=PretrainConfig()), fitting.digits(layout)
    sys.setprofile(profile)
    try:
        fitting.fit(module, data, layout, steps=1, exact=True)
    finally:
        sys.setprofile(None)
        del os.environ["MEGAKIT_STOCK"]
    return calls


def expected(rows: list[Row]) -> list[tuple[int, str]]:
    """The calls of a step with two micro batches."""
    first = next(place for place, row in enumerate(rows) if row[2])
    end = max(place for place, row in enumerate(rows) if row[2]) + 1
    whole = [*rows[:first], *rows[first:end] * MICRO_BATCHES, *rows[end:]]
    return [(depth, function) for depth, function, _ in whole]


def test_a_step(ranks: Ranks) -> None:
    functions = [*STOCK, *(function for _, function, _ in ROWS)]
    (calls,) = ranks.run(observe, functions, world_size=1)
    assert calls == expected(ROWS)
    assert len(ROWS) <= 16


def test_the_stock_step_has_one_more_call(ranks: Ranks) -> None:
    theirs = [f for _, f, _ in ROWS if not f.startswith("megakit.training.schedule:")]
    (calls,) = ranks.run(observe, [*STOCK, *theirs], True, world_size=1)
    names = [name for _, name in expected([row for row in ROWS if row[1] in theirs])]
    place = next(n for n, name in enumerate(names) if "forward_backward" in name)
    assert [name for _, name in calls] == [*names[:place], *STOCK, *names[place:]]


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text() == SCRIPT["picture"](), "run docs/images/make_step.py"


def test_the_page_explains_each_call() -> None:
    page = (REPOSITORY / "docs" / "concepts.md").read_text()
    section = page.partition("## One training step")[2].partition("\n## ")[0]
    items = re.findall(r"^(\d+)\. `([\w.]+)`", section, re.MULTILINE)
    shown = [call for call in SCRIPT["CALLS"] if not call.is_stock]
    assert items == [(str(n), call.name) for n, call in enumerate(shown, 1)]
    lines = re.findall(r"^\d+\. `.*", section, re.MULTILINE)
    for line, call in zip(lines, shown, strict=True):
        file = "/" + call.function.partition(":")[0].replace(".", "/") + ".py"
        named = re.findall(r"\(`([\w/]+\.py)`\)", line)
        assert all(file.endswith(f"/{path}") for path in named), line
