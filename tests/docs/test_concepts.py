"""docs/concepts.md: its code stands in the project, and `./run experiment N` prints what it shows.

So do the changes to try, in copies of the experiments.
"""

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
EXPERIMENTS = read_experiments()
#: The text of each demand's section, by its title.
SECTIONS = dict(re.findall(r"^### (\d.*)\n((?:(?!##).*\n)+)", TEXT, re.MULTILINE))
NUMBER = r"-?\d+\.\d+"
#: In this run, gloo ends the processes.
DEADLY = "without_stage_shape"
#: Begins the last part of a section: a change, and what it shows.
TRY = "**Try:** "


def shown(title: str, part: int = 0) -> list[str]:
    """What a section shows of its experiment, or of the change: one line for each run."""
    return "".join(blocks(SECTIONS[title].split(TRY)[part], "text")).splitlines()


CASES = [
    pytest.param(one, line, id=one.name)
    for experiment in EXPERIMENTS
    for one, line in zip(experiment.runs, shown(experiment.title), strict=True)
]

CYCLIC = {"GLOBAL_BATCH\n": 'GLOBAL_BATCH, dataloader_type="cyclic"\n'}
LONGER = {"tensor=2).weights": "tensor=2, steps=50).weights"}
DOES_NOTHING = {
    "del ExampleModelTrunk.set_input_tensor": "ExampleModelTrunk.set_input_tensor = lambda *_: None"
}
LOADS_ON_BOTH = {
    "with as_one_process()": "if True",
    'f"linear1.weight has the shape {[*model.linear1.weight.shape]}"': (
        'str(torch.equal(model.linear1.weight, weights["linear1.weight"]))'
    ),
}
AFTER_STEP = {"on_before_optimizer_step(self, optimizer: Any)": "on_train_batch_end(self, *args)"}
SAME_PRODUCT = {"(weight @ x.T.contiguous()).T": "nn.functional.linear(x, weight)"}
#: The changes to try: the experiment, one of its runs, and what replaces the last place of a text.
TRIES: list[tuple[int, str, dict[str, str]]] = [
    (1, "without_mean_over_ranks", {"OwnSamples))": "OwnSamples), tensor=2)"}),
    (2, "without_order_in_dataset", CYCLIC),
    (2, "with_order_in_dataset", {", tensor=2": ""}),
    (2, "without_order_in_dataset", {**CYCLIC, ", tensor=2": ""}),
    (
        3,
        "without_late_model",
        {
            "__init__(self, config: Any)": "setup(self, stage)",
            "super().__init__(config)": "config = self.config",
        },
    ),
    (4, "with_equal_initial_weights", LONGER),
    (4, "without_equal_initial_weights", LONGER),
    (5, "without_method", DOES_NOTHING),
    (5, "without_method", {**DOES_NOTHING, "train()": "train(pipeline=2, strategy=ExactStrategy)"}),
    (6, "without_backward_of_the_schedule", {".backward()": ".backward(retain_graph=True)"}),
    (7, "without_distributed_checkpoint", LOADS_ON_BOTH),
    (8, "with_second_generator", {"on_hidden": "on_latent"}),
    (8, "without_second_generator", {"on_hidden": "on_latent"}),
    (9, "without_main_grad", AFTER_STEP),
    (9, "without_main_grad", {**AFTER_STEP, "=module)": '=module, precision="bf16-mixed")'}),
    (10, DEADLY, {"latent_size=6": "latent_size=4"}),
    (10, DEADLY, {"latent_size=6": "latent_size=3"}),
    (11, "without_equal_names", {'"digit_classifier"': '"digit_classifier", "linear_1"'}),
    (12, "without_sum", SAME_PRODUCT),
    (12, "without_sum", {**SAME_PRODUCT, "x, weight)": "x, weight).T.contiguous().T"}),
]


TRY_LINES = [line for one in EXPERIMENTS for line in shown(one.title, 1)]
TRY_CASES = [
    pytest.param(*change, line, id=f"{change[0]}-{change[1]}")
    for change, line in zip(TRIES, TRY_LINES, strict=True)
]


def compare(found: str, line: str) -> None:
    """Numbers with a point may differ by rounding."""
    assert re.sub(NUMBER, "N", found) == re.sub(NUMBER, "N", line)
    observed, expected = ([*map(float, re.findall(NUMBER, text))] for text in (found, line))
    assert observed == pytest.approx(expected, rel=2e-3)


@pytest.mark.long
@pytest.mark.parametrize(("one", "line"), CASES)
def test_experiments(ranks: Ranks, one: Run, line: str) -> None:
    with Ranks(2) as own:  # starts no process until it is used
        compare(one.result(own if one.name == DEADLY else ranks), line)


@pytest.mark.long
@pytest.mark.parametrize(("number", "name", "edits", "line"), TRY_CASES)
def test_changes_to_try(
    ranks: Ranks, tmp_path: Path, number: int, name: str, edits: dict[str, str], line: str
) -> None:
    copy = tmp_path / EXPERIMENTS[number - 1].path.name
    text = EXPERIMENTS[number - 1].path.read_text()
    for old, new in edits.items():
        before, found, after = text.rpartition(old)
        assert found
        text = before + new + after
    copy.write_text(text)
    compare(Run(copy, name, "").result(ranks), line)


def test_every_section_has_its_experiment() -> None:
    """With runs of both kinds, a file that the section names, and the same change to try."""
    assert [one.title for one in EXPERIMENTS] == [*SECTIONS]
    for number, experiment in enumerate(EXPERIMENTS, start=1):
        section = SECTIONS[experiment.title]
        assert {one.name.partition("_")[0] for one in experiment.runs} == {"with", "without"}
        file = experiment.path.relative_to(REPOSITORY)
        assert f"`./run experiment {number}` ([file](../{file}))" in section
        change = " ".join(experiment.texts[-1].removeprefix("Try: ").split())
        assert f"{TRY}{change}\n\n<details><summary>Answer</summary>\n" in section
        assert shown(experiment.title, 1)


@pytest.mark.long
def test_the_command_prints_what_the_page_shows() -> None:
    experiment = EXPERIMENTS[2]
    done = run(REPOSITORY / "run", "experiment", "3", stdin="", VENV=sys.prefix)
    assert done.output().splitlines() == shown(experiment.title)
    parts = [experiment.title, *experiment.texts, *(one.what for one in experiment.runs)]
    assert [part for part in parts if part not in done.err] == []
    assert "Press Enter" not in done.err  # nobody is there to press it


def test_the_command_lists_the_experiments_and_refuses_other_numbers() -> None:
    command = "experiments/experiment.py"
    assert run_script(command).output().splitlines() == [one.title for one in EXPERIMENTS]
    refused = run_script(command, "13")
    assert (refused.status, refused.out) == (2, "")
    told = "run: experiment 13: the experiments have the numbers 1 to 12. "
    assert refused.err.startswith(told)


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
    from megakit.nemo.strategy import ExactStrategy
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
