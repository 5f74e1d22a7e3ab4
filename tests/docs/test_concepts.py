"""docs/concepts.md: its code stands in the project, and `./run experiment N` prints its lines."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.experiment import Run, read_experiments
from megakit.testing import Ranks
from tests.docs.pages import blocks, read_page
from tests.scripts import REPOSITORY, run, run_script

TEXT = read_page("docs/concepts.md")
DEMANDS = read_experiments()
#: The text of each demand's section, by its title.
SECTIONS = dict(re.findall(r"^### (\d.*)\n((?:(?!##).*\n)+)", TEXT, re.MULTILINE))
NUMBER = r"-?\d+\.\d+"
#: In this run, gloo ends the processes.
DEADLY = "without_stage_shape"


def shown(title: str) -> list[str]:
    """What a section shows of its experiment: one line for each run."""
    return "".join(blocks(SECTIONS[title], "text")).splitlines()


CASES = [
    pytest.param(one, line, id=one.name)
    for demand in DEMANDS
    for one, line in zip(demand.runs, shown(demand.title), strict=True)
]


@pytest.mark.long
@pytest.mark.parametrize(("one", "line"), CASES)
def test_experiments(ranks: Ranks, one: Run, line: str) -> None:
    """Numbers with a point may differ by rounding."""
    with Ranks(2) as own:  # starts no process until it is used
        found = one.result(own if one.name == DEADLY else ranks)
    assert re.sub(NUMBER, "N", found) == re.sub(NUMBER, "N", line)
    observed, expected = ([*map(float, re.findall(NUMBER, text))] for text in (found, line))
    assert observed == pytest.approx(expected, rel=2e-3)


def test_every_section_has_its_experiment() -> None:
    """With runs of both kinds, and a file that the section names."""
    assert [demand.title for demand in DEMANDS] == [*SECTIONS]
    for number, demand in enumerate(DEMANDS, start=1):
        assert {one.name.partition("_")[0] for one in demand.runs} == {"with", "without"}
        file = demand.path.relative_to(REPOSITORY)
        assert f"`./run experiment {number}` ([file](../{file}))" in SECTIONS[demand.title]


@pytest.mark.long
def test_the_command_prints_what_the_page_shows() -> None:
    demand = DEMANDS[2]
    done = run(REPOSITORY / "run", "experiment", "3", stdin="", VENV=sys.prefix)
    assert done.output().splitlines() == shown(demand.title)
    parts = [demand.title, *demand.texts, *(one.what for one in demand.runs)]
    assert [part for part in parts if part not in done.err] == []
    assert "Press Enter" not in done.err  # nobody is there to press it


def test_the_command_lists_the_experiments_and_refuses_other_numbers() -> None:
    command = "experiments/experiment.py"
    assert run_script(command).output().splitlines() == [demand.title for demand in DEMANDS]
    refused = run_script(command, "13")
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.startswith("run: experiment 13: the experiments have the numbers 1 to 12. ")


def test_code_is_quoted_from_the_project() -> None:
    """After a line that ends with "`FILE`:"."""
    quoted = re.findall(r"`([\w/]+\.py)`:\n\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(quoted) == len(blocks(TEXT, "python")) >= 12
    for file, code in quoted:
        for part in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):
            assert stripped(part) in stripped(read_page(file)), f"{file} lacks:\n{part}"


def stripped(code: str) -> str:
    """The lines of code without their indentation; empty ones are left out."""
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


#: The rows of the table of precisions: of each tensor, its type in bf16-mixed and in 32.
PRECISIONS = re.findall(r"^\| (.*?) \| (\w+) \| (\w+) \| ", TEXT, re.MULTILINE)


def types_of_tensors(precision: str, folder: Path) -> list[str]:
    """The type of each tensor of the table, in a training of two steps."""
    from unittest.mock import patch

    from megatron.core import dist_checkpointing

    from experiments.training import Watch, train
    from megakit.training.strategy import ExactStrategy
    from model_components import MSELossReduction

    found: dict[str, Any] = {}
    compute, end = MSELossReduction.forward, Watch.on_train_end

    def forward(self: Any, batch: Any, output: Any) -> Any:
        result = compute(self, batch, output)
        found.update(z=output["z"], output=output["x_hat"], loss=result[0])
        return result

    def on_train_end(self: Any, trainer: Any, module: Any) -> None:
        weight = next(module.parameters())
        (adam,) = trainer.strategy.optimizers[0].mcore_optimizer.chained_optimizers
        main = getattr(weight, "main_param", None)
        found.update(weight=weight, gradient=weight.main_grad, main=main)
        found["moments"] = adam.optimizer.state[weight if main is None else main]["exp_avg"]
        end(self, trainer, module)

    with (
        patch.object(MSELossReduction, "forward", forward),
        patch.object(Watch, "on_train_end", on_train_end),
    ):
        train(strategy=ExactStrategy, precision=precision, save_to=folder)
    saved = dist_checkpointing.load_tensors_metadata(str(folder / "weights"))
    for name, key in (("saved", ""), ("saved main", "optimizer.state.fp32_param.")):
        found[name] = saved.get(f"{key}module.linear1.weight")
    order = ("weight", "z", "output", "loss", "gradient", "main", "moments", "saved", "saved main")
    types = [getattr(found[name], "dtype", None) for name in order]
    return [str(one).lower().removeprefix("torch.") for one in types]


@pytest.mark.long
@pytest.mark.parametrize(("column", "precision"), [(1, "bf16-mixed"), (2, "32")])
def test_precisions(ranks: Ranks, column: int, precision: str, tmp_path: Path) -> None:
    (found,) = ranks.run(types_of_tensors, precision, tmp_path / "saved", world_size=1)
    assert found == [row[column] for row in PRECISIONS]


def test_versions_are_those_of_the_lock() -> None:
    lock = read_page("requirements.lock")
    names = {"Lightning": "lightning", "NeMo 2": "nemo-toolkit", "Megatron-Core": "megatron-core"}
    for name, package in names.items():
        (version,) = re.findall(rf"^{package}(?:\[.*\])?==([\d.]+)", lock, re.MULTILINE)
        assert f"**{name}** ({version})" in TEXT
