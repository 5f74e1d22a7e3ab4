"""The picture of one training step in docs/concepts.md shows the calls of a real training step."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ElementTree
from typing import Any

from megakit.testing import Ranks
from tests.docs import fitting
from tests.scripts import REPOSITORY

PICTURE = REPOSITORY / "docs" / "images" / "training_step.svg"
SCRIPT = runpy.run_path(str(PICTURE.with_name("make_step.py")))
#: Depth, function, and whether it is called for each micro batch.
Row = tuple[int, str, bool]
ROWS: list[Row] = [(call.depth, call.function, call.repeated) for call in SCRIPT["CALLS"]]
MICRO_BATCHES = 2
#: What the project's own strategy calls instead; None for nothing.
OURS = {
    "MegatronStrategy.optimizer_step": "megakit.training.strategy:ExactStrategy.optimizer_step",
    "MegatronStrategy.training_step": "megakit.training.strategy:ExactStrategy.training_step",
    "MegatronParallel.training_step": None,
    "default_data_step": "megakit.training.strategy:ExactStrategy._next_batch",
}
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
PIPELINED = f"{SCHEDULES}:forward_backward_pipelining_without_interleaving"


def observe(functions: list[str], exact: bool, pipeline: int) -> list[tuple[int, str]]:
    """Trains for one step; returns the calls of these functions in order, with their depth."""
    import importlib
    import sys

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

    layout = fitting.Layout(pipeline=pipeline, micro_batch=8, global_batch=16)
    module, data = Module(config=PretrainConfig()), fitting.digits(layout)
    sys.setprofile(profile)
    try:
        fitting.fit(module, data, layout, steps=1, exact=exact)
    finally:
        sys.setprofile(None)
    return calls


def expected(rows: list[Row]) -> list[tuple[int, str]]:
    """The calls of a step with two micro batches."""
    first = next(place for place, row in enumerate(rows) if row[2])
    end = max(place for place, row in enumerate(rows) if row[2]) + 1
    whole = [*rows[:first], *rows[first:end] * MICRO_BATCHES, *rows[end:]]
    return [(depth, function) for depth, function, _ in whole]


def test_a_step_of_nemos_strategy(ranks: Ranks) -> None:
    functions = [function for _, function, _ in ROWS]
    (calls,) = ranks.run(observe, functions, False, 1, world_size=1)
    assert calls == expected(ROWS)


def test_a_step_of_our_strategy(ranks: Ranks) -> None:
    """Without the call of MegatronParallel, and otherwise the same."""
    rows: list[Row] = []
    left_out: list[int] = []
    for depth, function, repeated in ROWS:
        left_out = [place for place in left_out if place < depth]
        ours = OURS.get(function.partition(":")[2], function)
        if ours is None:
            left_out.append(depth)
        else:
            rows.append((depth - len(left_out), ours, repeated))
    functions = [function for _, function, _ in ROWS] + [row[1] for row in rows]
    (calls,) = ranks.run(observe, functions, True, 1, world_size=1)
    assert calls == expected(rows)


def test_a_step_of_two_stages(ranks: Ranks) -> None:
    """Another schedule; the loss is computed and reduced on the last stage only."""
    functions = [function for _, function, _ in ROWS]
    first, last = (
        [name.rpartition(":")[2] for _, name in calls]
        for calls in ranks.run(observe, [*functions, PIPELINED], False, 2)
    )
    of_loss = {"MSELossReduction.forward", "MeanLossReduction.reduce"}
    assert of_loss <= set(last)
    assert set(first) == set(last) - of_loss | {"forward_step"}
    for calls in (first, last):
        assert PIPELINED.partition(":")[2] in calls
        assert "forward_backward_no_pipelining" not in calls
        assert calls.count("backward_step") == MICRO_BATCHES


def test_the_script_calls_fit() -> None:
    """The picture says so, and the page names the functions in between."""
    assert "train_stage(run, " in (REPOSITORY / "model_pretrain.py").read_text()
    assert "train(model=" in (REPOSITORY / "megakit" / "training" / "stages.py").read_text()
    assert "trainer.fit(" in (REPOSITORY / "megakit" / "training" / "trainer.py").read_text()


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text() == SCRIPT["picture"](), "run docs/images/make_step.py"


def test_the_picture_has_texts_for_screen_readers() -> None:
    root = ElementTree.fromstring(PICTURE.read_text())
    texts = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
    assert "step" in texts["title"]
    assert all(call.name in texts["desc"] for call in SCRIPT["CALLS"])
    ids = {child.get("id") for child in root}
    assert set(str(root.get("aria-labelledby")).split()) <= ids


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(colour: str) -> float:
        shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_picture_is_readable_in_light_and_dark() -> None:
    light, dark = SCRIPT["style"]().split("@media (prefers-color-scheme: dark)")
    for style, place in ((light, 0), (dark, 1)):
        (text,) = re.findall(r"text\{fill:(#\w+)\}", style)
        (back,) = re.findall(r"\.back\{fill:(#\w+)\}", style)
        fills = [fill[place] for fill in SCRIPT["FILLS"].values()]
        assert all(fill in style for fill in fills)
        assert all(contrast(text, fill) >= 7 for fill in (back, *fills))


def test_no_text_is_wider_than_its_row() -> None:
    """A character of 13 pixels is at most 8 pixels wide in monospace and 7.4 on average in sans."""
    for call in SCRIPT["CALLS"]:
        width = SCRIPT["WIDTH"] - SCRIPT["MARGIN"] * 2 - 60 - call.depth * SCRIPT["INDENT"]
        assert 8 * len(f"00. {call.name}") < width
        assert 7.4 * len(f"{call.owner}: {call.note}") < width


def test_the_page_explains_each_call() -> None:
    page = (REPOSITORY / "docs" / "concepts.md").read_text()
    section = page.partition("## One training step")[2].partition("\n## ")[0]
    items = re.findall(r"^(\d+)\. `([\w.]+)`", section, re.MULTILINE)
    assert items == [(str(n), call.name) for n, call in enumerate(SCRIPT["CALLS"], 1)]
    lines = re.findall(r"^\d+\. `.*", section, re.MULTILINE)
    for line, call in zip(lines, SCRIPT["CALLS"], strict=True):
        file = "/" + call.function.partition(":")[0].replace(".", "/") + ".py"
        named = re.findall(r"\(`([\w/]+\.py)`\)", line)
        assert all(file.endswith(f"/{path}") for path in named), line
