"""docs/parallelism.md: its examples run."""

import re
import sys
from typing import Any

import pytest

from tests.scripts import REPOSITORY, run, run_python

DOCUMENT = REPOSITORY / "docs" / "parallelism.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_the_example_runs(ranks):
    code, _, _ = python_blocks()
    names: dict[str, Any] = {"__name__": "example"}
    exec(code, names)
    names["test_every_rank_has_half"](ranks)


@pytest.mark.long
def test_the_example_of_fake_ranks_runs():
    """In a process of its own, which has not used Megatron yet."""
    _, code, _ = python_blocks()
    done = run_python("-c", code + "\ntest_a_rank_of_1024()\n")
    assert done.status == 0, done.err


def test_the_layout_command_prints_what_is_shown():
    text = DOCUMENT.read_text()
    (command, shown) = re.findall(
        r"^\./run (layout --.*)\n```\n\n```\n((?:.*\n)*?)```", text, re.M
    )[0]
    done = run(REPOSITORY / "run", *command.split(), "--dataset", "digits", VENV=sys.prefix)
    assert done.output() == shown


TEN_STEPS = """
import torch

def train_ten_steps(device):
    for _ in range(10):
        torch.ones(3, device=device).sum().item()

"""


@pytest.mark.long
def test_the_example_without_a_gpu_runs() -> None:
    _, _, code = python_blocks()
    done = run_python("-c", TEN_STEPS + code)
    assert done.status == 0, done.err
