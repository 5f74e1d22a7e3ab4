"""The README of `./run new` and docs/adapting.md name only options and fields that exist."""

import ast
import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megakit.job.ranges import flag
from megakit.job.stage import Stage
from tests.scripts import REPOSITORY

TEMPLATES = sorted(path.parent.name for path in REPOSITORY.glob("template/*/README.md.jinja"))
#: Options of `./run tests`, `./run setup`, and of uv in the command that renews the locks.
OF_RUN = {"--all", "--venv"}
OF_UV = {
    *("--generate-hashes", "--universal", "--no-strip-extras", "--no-annotate", "--no-header"),
    *("--quiet", "--python-version", "--find-links", "--group"),
}
TUTORIAL = (*REPOSITORY.glob("model_*.py"), *REPOSITORY.glob("mnist/*.py"))


def sources(template: str) -> list[Path]:
    """The Python files of a project that is made from a template, without its tests."""
    if template == "tutorial":
        return [*TUTORIAL]
    return [*(REPOSITORY / "examples" / template).glob("*.py"), *TUTORIAL]


def text_of(template: str) -> str:
    """A README as `./run new` writes it."""
    folder = REPOSITORY / "template"
    own = (folder / template / "README.md.jinja").read_text()
    return own.replace('{% include "files.md" %}', (folder / "files.md").read_text())


def options(template: str) -> set[str]:
    """The options of the scripts of a project."""
    folder = REPOSITORY if template == "tutorial" else REPOSITORY / "examples" / template
    found = {"--seed", "--fresh"} if template == "tutorial" else set()
    for path in folder.glob("model_*.py"):
        if path.stem != "model_components":
            name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
            classes = vars(importlib.import_module(name)).values()
            own = [one for one in classes if isinstance(one, type) and one.__module__ == name]
            found |= {
                flag(field.name)
                for one in own
                if dataclasses.is_dataclass(one)
                for field in dataclasses.fields(one)
            }
    return found


def names(paths: list[Path]) -> Iterator[str]:
    """What files define: classes, functions, arguments, attributes; no local variables."""
    for path in paths:
        tree = ast.parse(path.read_text(), str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.arg | ast.keyword):
                yield node.arg or ""  # `**options` has no name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr
            if isinstance(node, ast.Module | ast.ClassDef):
                for member in node.body:
                    targets = member.targets if isinstance(member, ast.Assign) else []
                    targets = [member.target] if isinstance(member, ast.AnnAssign) else targets
                    yield from (one.id for one in targets if isinstance(one, ast.Name))


def named_options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def named_fields(text: str) -> set[str]:
    """Words in back quotes that look like a name of Python, without fenced blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([A-Za-z]\w*)`", prose))


@pytest.mark.parametrize("template", TEMPLATES)
def test_options_in_the_readme_of_a_project_exist(template: str) -> None:
    named = named_options(text_of(template))
    assert "--tensor-parallel" in named
    assert named <= options(template) | OF_RUN | OF_UV


@pytest.mark.parametrize("template", TEMPLATES)
def test_fields_in_the_readme_of_a_project_exist(template: str) -> None:
    stage = {field.name for field in dataclasses.fields(Stage)}
    named = named_fields(text_of(template)) - {"megakit", "mnist", "run", "LICENSE"}
    assert "Stage" in named
    assert named <= {*names(sources(template))} | stage | {"Stage", "GPTModel"}


def test_a_name_that_does_not_exist_is_noticed() -> None:
    """`num_stages` was in all READMEs; it is a local variable of megakit."""
    text = "`num_stages` of a `Stage`; `--num-stages`"
    assert named_fields(text) == {"num_stages", "Stage"}
    assert named_options(text) == {"--num-stages"}
    assert "num_stages" not in names([*(REPOSITORY / "megakit").rglob("*.py")])


def test_fields_in_the_page_on_adapting_exist() -> None:
    text = (REPOSITORY / "docs" / "adapting.md").read_text()
    library = [*(REPOSITORY / "megakit").rglob("*.py")]
    known = {*names([*library, *REPOSITORY.glob("examples/*/*.py"), *TUTORIAL])}
    # A prefix of columns, an argument of torch's, and an attribute that Megatron sets by name.
    others = {"val_", "ignore_index", "core_attn"}
    snake = {name for name in named_fields(text) if "_" in name} - others
    assert {"num_pipeline_stages", "resolve_dataset"} & snake
    assert sorted(snake - known - fields_of_megatron()) == []


def fields_of_megatron() -> set[str]:
    """What Megatron's files of models and of their configs define; Megatron is not imported."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    core = Path(spec.origin).parent
    folders = (core / "transformer", core / "models" / "gpt")
    files = [core / "model_parallel_config.py", *(p for f in folders for p in f.rglob("*.py"))]
    return {*names(files)}
