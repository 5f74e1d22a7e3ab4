"""docs/parallelism.md: its code runs, its pictures are what their script draws."""

import re
import runpy
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.scripts import REPOSITORY, run, run_python

DOCUMENT = REPOSITORY / "docs" / "parallelism.md"
IMAGES = REPOSITORY / "docs" / "images"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_the_example_runs(ranks):
    code, _, _ = python_blocks()
    names: dict[str, Any] = {"__name__": "example"}
    exec(code, names)
    names["test_every_rank_has_half"](ranks)


def test_the_example_of_fake_ranks_runs():
    """In a process of its own, which has not used Megatron yet; another shape is noticed."""
    _, code, _ = python_blocks()
    code += "\ntest_a_rank_of_1024()\n"
    assert run_python("-c", code).status == 0
    done = run_python("-c", code.replace("(784, 16)", "(784, 32)"))
    assert "AssertionError" in done.err


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


@pytest.mark.parametrize("is_twice", [False, True])
def test_the_example_without_a_gpu_runs(is_twice: bool) -> None:
    """And fails when the host waits more often."""
    _, _, code = python_blocks()
    if is_twice:
        code = re.sub(r"( *train_ten_steps.*\n)", r"\1\1", code)
    done = run_python("-c", TEN_STEPS + code)
    assert done.status == is_twice, done.err
    assert (
        "AssertionError: 10 _local_scalar_dense at <string>:6 train_ten" in done.err
    ) == is_twice


def test_the_rates_are_those_of_the_results() -> None:
    results = (REPOSITORY / "benchmarks" / "RESULTS.md").read_text()
    rates = re.findall(r"^\|.*samples/s.*$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rates) == 8
    assert [row for row in rates if row not in results] == []


def test_the_pictures_are_what_the_script_draws(tmp_path):
    pictures = runpy.run_path(str(IMAGES / "make_parallelism.py"))
    pictures["draw"].__globals__["FOLDER"] = tmp_path
    pictures["main"]()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    shown = set(re.findall(r"\(images/(\w+\.svg)\)", DOCUMENT.read_text()))
    assert drawn.keys() == shown
    for name, text in drawn.items():
        assert (IMAGES / name).read_text() == text


def test_numbers_of_weights(ranks):
    """Those in the text, and those that the pictures give each rank."""
    (number,) = ranks.run(count, world_size=1)
    assert f"{number:,} numbers" in DOCUMENT.read_text()
    picture = (IMAGES / "tensor_parallel.svg").read_text()
    for shape in ("32 x 784, bias 32", "3 x 32", "32 x 3, bias 32", "784 x 32"):
        assert picture.count(f">{shape} (of 64") == 2


def count():
    from megakit.testing import distributed_model_parallel_state
    from model_components import PretrainConfig

    with distributed_model_parallel_state():
        model = PretrainConfig().configure_model()
        return sum(weight.numel() for weight in model.parameters())


def test_the_gpu_check_is_sound_bash_and_says_where_there_is_no_gpu():
    script = REPOSITORY / "benchmarks" / "gpu_check.sh"
    subprocess.run(["bash", "-n", script], check=True)
    result = run(script, PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert result.status == 2
    assert result.err.endswith("gpu_check: no GPU that works, see above.\n")
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not there")
    subprocess.run(["shellcheck", script], check=True)
