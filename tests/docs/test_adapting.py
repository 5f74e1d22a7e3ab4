"""docs/adapting.md, followed to the letter: a model of one's own from the tutorial's files."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, run

PAGE = REPOSITORY / "docs" / "adapting.md"
TEXT = PAGE.read_text()


STEPS, CHANGES = TEXT.split("\n## What to change for\n")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def follow(text: str, folder: Path) -> Path:
    """Does what a part of the page says; returns the folder that it leads to."""
    for kind, code in BLOCK.findall(text):
        if kind == "bash":
            folder = shell(code, folder)
        elif kind == "diff":
            change_lines(code, folder)
        elif kind == "python":
            edit(code, folder)
        else:
            assert kind in ("text", "console"), f"a block of {kind}"
    return folder


def shell(code: str, folder: Path) -> Path:
    """Runs commands, looks for what they should print, and returns the folder they ended in."""
    # What CI exports for this project is not for the new one.
    program = f"exec 2>&1\n{code}\necho folder: $PWD"
    done = run("bash", "-euo", "pipefail", "-c", program, cwd=folder, VENV=None, PYTHON=None)
    said = done.out
    assert done.status == 0, f"{code}\n{said}"
    spaced = " ".join(said.split())
    for line in re.findall(r"^#> *(.*)$", code, re.MULTILINE):
        assert line in spaced, f"no {line!r} in\n{said}"
    return Path(re.findall(r"^folder: (.*)$", said, re.MULTILINE)[-1])


def edit(code: str, folder: Path) -> None:
    """Writes a file, or a part of it: its first line says where it belongs."""
    head, _, body = code.partition("\n")
    found = re.match(r"# (\S+\.py)(?:: instead of (\S+)|(: at the end))?$", head)
    assert found, f"a block without its place: {head}"
    path = folder / found[1]
    # Never this project's own: a link would lead there.
    assert not path.resolve().is_relative_to(REPOSITORY)
    if found[2]:
        body = instead(path.read_text(), found[2], body)
    elif found[3]:
        body = path.read_text() + "\n\n" + body
    path.write_text(body)


def change_lines(code: str, folder: Path) -> None:
    """Replaces lines of files; the first line names the files."""
    head, _, body = code.partition("\n")
    found = re.match(r"# (\S+(?:, \S+)*)$", head)
    assert found, f"changes without their file: {head}"
    for name in found[1].split(", "):
        path = folder / name
        assert not path.resolve().is_relative_to(REPOSITORY)
        source = path.read_text()
        for place in body.split("@@\n"):
            lines = place.splitlines(keepends=True)
            assert {line[0] for line in lines} <= set("+- "), place
            before, after = (
                "".join(line[1:] for line in lines if line[0] in s) for s in ("- ", "+ ")
            )
            assert source.count(before) == 1, f"not once in {name}:\n{before}"
            source = source.replace(before, after)
        path.write_text(source)


def instead(source: str, name: str, code: str) -> str:
    """The source with one of its classes, functions or methods replaced."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        (node,) = (
            below for below in ast.iter_child_nodes(node) if getattr(below, "name", None) == part
        )
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    assert node.end_lineno is not None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: first - 1], code, *lines[node.end_lineno :]])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the seven steps lead to."""
    folder = tmp_path_factory.mktemp("adapting") / "my-model"
    places = {
        "./run new ../my-model --venv .venv": (
            f"VENV={sys.prefix} ./run new {folder} --venv {sys.prefix}"
        ),
        "../my-model": str(folder),
    }
    text = STEPS
    for here, there in places.items():
        text = text.replace(here, there)
    return follow(text, REPOSITORY)


@pytest.mark.long
def test_seven_steps_lead_to_a_model(project: Path) -> None:
    summary = json.loads((project / "runs" / "predict" / "summary.json").read_text())
    assert summary["num_samples"] == 300
    assert summary["accuracy"] > 0.9


@pytest.mark.long
def test_what_to_change_for(project: Path) -> None:
    follow(CHANGES, project)
