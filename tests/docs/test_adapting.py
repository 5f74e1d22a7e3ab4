"""docs/adapting.md, followed to the letter: a model of one's own from the tutorial's files."""

import ast
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megakit.testing import Ranks, distributed_model_parallel_state
from tests.scripts import REPOSITORY, read_csv, run

PAGE = REPOSITORY / "docs" / "adapting.md"
TEXT = PAGE.read_text()
#: The tutorial's commands, from a copy.
OURS = f"VENV={sys.prefix} {REPOSITORY / 'run'}"

STEPS, REST = TEXT.split("\n## A regression\n")
REGRESSION, CHANGES = REST.split("\n## What to change for\n")
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


def block(name: str) -> str:
    """The page's only block that is a file of this name."""
    (code,) = (code for _, code in BLOCK.findall(TEXT) if code.startswith(f"# {name}\n"))
    return code


def shell(code: str, folder: Path) -> Path:
    """Runs commands, looks for what they should print, and returns the folder they ended in."""
    # What CI exports for this project is not for the new one.
    code = code.replace("../tutorial/run", OURS)
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


def copy_and_follow(text: str, name: str, folder: Path) -> Path:
    """Does what a part of the page says that begins with a new copy; returns the copy's folder."""
    path = folder / name
    places = {
        f"./run new ../{name} --venv .venv": (f"{OURS} new {path} --venv {sys.prefix}"),
        f"../{name}": str(path),
    }
    for here, there in places.items():
        assert here in text
        text = text.replace(here, there)
    return follow(text, REPOSITORY)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the seven steps lead to."""
    return copy_and_follow(STEPS, "my-model", tmp_path_factory.mktemp("adapting"))


@pytest.mark.long
def test_seven_steps_lead_to_a_model(project: Path) -> None:
    summary = json.loads((project / "runs" / "predict" / "summary.json").read_text())
    assert summary["num_samples"] == 300
    assert summary["accuracy"] > 0.9


@pytest.mark.long
def test_what_to_change_for(project: Path) -> None:
    follow(CHANGES, project)


@pytest.mark.long
def test_a_regression(tmp_path: Path) -> None:
    """Its `./run tests` also compare layouts, and stop a run."""
    project = copy_and_follow(REGRESSION, "my-regression", tmp_path)
    summary = json.loads((project / "runs" / "predict" / "summary.json").read_text())
    assert (summary["num_samples"], summary["precision"]) == (1000, "32")
    assert summary["r2"] > 0.9


def test_norms_of_layers_before_clipping(ranks: Ranks, tmp_path: Path) -> None:
    """Their sum is the norm of the gradient, which is larger than that after clipping, 1."""
    ranks.run(train_with, block("my_callbacks.py"), tmp_path, world_size=1)
    rows = read_csv(tmp_path / "finetune" / "metrics.csv")
    assert len(rows) == 3
    for row in rows:
        squares = [float(row[name]) ** 2 for name in row if name.startswith("train_norm_")]
        assert len(squares) == 3  # two layers of the trunk, and the head
        assert sum(squares) ** 0.5 == pytest.approx(float(row["grad_norm"]), rel=1e-5)
    assert max(float(row["grad_norm"]) for row in rows) > 1


def train_with(code: str, folder: Path) -> None:
    """Fine-tunes three steps with the page's callback."""
    import model_finetune as script
    from megakit.training import train
    from tests.parallel import jobs

    names: dict[str, Any] = {}
    exec(code, names)
    sizes = {"max_steps": 3, "val_interval": 1, "save_interval": 3, "checkpoint": "none"}
    run = jobs.make_run(
        script.FINETUNE, jobs.options_of("finetune", folder, **sizes), jobs.layout()
    )
    module, data, trainer = jobs.built_by(script.finetune, run)
    trainer.callbacks.insert(0, names["GradientNorms"]())
    train(model=module, data=data, trainer=trainer)


@pytest.mark.long
def test_what_a_gather_does_to_gradients() -> None:
    """Of the page's model, and of the same model with Megatron's default."""
    code = block("my_tokens.py")
    default = code.replace(", tensor_parallel_output_grad=False", "")
    assert default != code
    with Ranks(2) as ranks:
        (alone,) = ranks.run(gradient_norm, code, world_size=1)
        assert ranks.run(gradient_norm, code) == pytest.approx([alone] * 2, rel=1e-5)
        assert ranks.run(gradient_norm, default) == pytest.approx([2 * alone] * 2, rel=1e-5)


def gradient_norm(code: str) -> float:
    """The norm of the gradient of the transformer of the page's model."""
    import torch
    from torch.distributed import get_world_size

    with distributed_model_parallel_state(tensor_model_parallel_size=int(os.environ["WORLD_SIZE"])):
        from examples.vit.vit_components import VitClassifierConfig

        names: dict[str, Any] = {}
        exec(code, names)
        config: Any = VitClassifierConfig(seed=1)
        config.tensor_model_parallel_size = get_world_size()
        config.sequence_parallel = get_world_size() > 1
        model = names["TokenClassifier"](config)
        tokens = torch.randn(8, 5, config.hidden_size, generator=torch.Generator().manual_seed(2))
        torch.nn.functional.cross_entropy(model(tokens), torch.arange(5)).backward()
        total = torch.zeros(())
        for weight in model.transformer.parameters():
            if getattr(weight, "sequence_parallel", False):
                torch.distributed.all_reduce(weight.grad)
            square = weight.grad.square().sum()
            if getattr(weight, "tensor_model_parallel", False):
                torch.distributed.all_reduce(square)
            total += square
        return float(total**0.5)
