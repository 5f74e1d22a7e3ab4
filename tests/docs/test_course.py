"""docs/course: each chapter has its parts; its experiments, faults and tables are what runs show.

The changes to try are made in copies of the experiments.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from exercises.course import read_course
from experiments.experiment import Run, read_experiments
from megakit.testing import Ranks
from tests.docs.pages import blocks, read_page, read_pages
from tests.scripts import REPOSITORY, run, run_script

CHAPTERS = {
    place: text for place, text in read_pages().items() if re.match(r"docs/course/\d", place)
}
COURSE = "\n".join(CHAPTERS.values())
EXPERIMENTS = read_experiments()
NUMBER = r"-?\d+\.\d+"
#: In this run, gloo ends the processes.
DEADLY = "without_stage_shape"
PARTS = ["Run this", "Read these lines", "Write it yourself", "What goes wrong", "Check yourself"]


def printed(command: str) -> list[str]:
    """The lines that the course shows as printed by a command; none if it does not show them."""
    shown = re.findall(rf"<!-- printed: {command} -->\n```text\n(.*?)```", COURSE, re.DOTALL)
    return str(shown[0]).splitlines() if shown else []


CASES = [
    pytest.param(one, line, id=one.name)
    for number, experiment in enumerate(EXPERIMENTS, start=1)
    for one, line in zip(experiment.runs, printed(f"./run experiment {number}"), strict=True)
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


#: The lines that the course shows of each change, in the order of `TRIES`.
TRY_LINES = {n: printed(f"./run experiment {n}, changed") for n in range(1, len(EXPERIMENTS) + 1)}
TRY_CASES = [
    pytest.param(*change, line, id=f"{change[0]}-{change[1]}")
    for number, lines in TRY_LINES.items()
    for change, line in zip(
        [one for one in TRIES if one[0] == number and lines], lines, strict=True
    )
]
#: Faults: the commands, whose last line has the loss, and this line in the folded answer.
FAULTS = re.findall(
    r"^```bash\n((?:(?!^```$)[^\0])*?tail -n 1\n)```\n\n<details>"
    r"(?:(?!</details>)[^\0])*?```text\n(\d+ [\d. ]+)\n```",
    COURSE,
    re.MULTILINE,
)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all faults: one reads what another one has saved."""
    folder = tmp_path_factory.mktemp("faults")
    for name in ("megakit", "mnist", "ladder", "run", "tools"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "build").mkdir()
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("commands", "line"), FAULTS)
def test_faults(commands: str, line: str, mnist_dir: Path, folder: Path) -> None:
    """The last line that the commands of a chapter print."""
    variables: dict[str, Any] = {"MNIST_DATA_DIR": str(mnist_dir), "OMP_NUM_THREADS": "1"}
    variables |= {"VENV": sys.prefix}
    done = run("bash", "-euo", "pipefail", "-c", commands, cwd=folder, **variables).output()
    found = [float(word) for word in done.splitlines()[-1].split()]
    assert found == pytest.approx([float(word) for word in line.split()], rel=1e-5)


def test_the_course_has_its_faults() -> None:
    """Else the test above could not fail."""
    assert len(FAULTS) >= 8


@pytest.mark.parametrize("place", CHAPTERS)
def test_each_chapter_has_its_parts(place: str) -> None:
    """A question, minutes and a picture, then five parts, of which the last has three questions."""
    text, number = CHAPTERS[place], int(place.split("/")[-1][:2])
    head, *parts = text.split("\n## ")
    assert head.startswith(f"# {number}. ")
    assert "**The question:**" in head
    assert re.search(r"^\*\d+ minutes.*\*$", head, re.MULTILINE)
    assert head.count("](../images/") == 1
    assert [part.partition("\n")[0] for part in parts] == PARTS
    assert len(blocks(parts[0], "bash")) == 1
    assert parts[-1].count("<details><summary>Answer</summary>\n\n") == 3
    assert len(text.split()) <= 1_200


def test_the_path_has_each_chapter_and_its_minutes() -> None:
    path = read_page("docs/course/index.md")
    rows = re.findall(r"\| \[.*?\]\((\d\d_\w+\.md)\) \| (\d+) \|", path)
    assert [f"docs/course/{name}" for name, _ in rows] == [*CHAPTERS]
    for name, minutes in rows:
        assert f"\n*{minutes} minutes" in CHAPTERS[f"docs/course/{name}"], name


def test_each_experiment_and_exercise_has_its_chapter() -> None:
    for number, experiment in enumerate(EXPERIMENTS, start=1):
        assert len(printed(f"./run experiment {number}")) == len(experiment.runs), number
        assert {one.name.partition("_")[0] for one in experiment.runs} == {"with", "without"}
        if TRY_LINES[number]:
            change = " ".join(experiment.texts[-1].removeprefix("Try: ").split())
            assert f"**Try:** {change}" in COURSE, number
    assert len(TRY_CASES) >= 12
    for number in range(1, len(read_course()) + 1):
        assert len(re.findall(rf"`./run exercise {number}`", COURSE)) >= 1, number


@pytest.mark.long
def test_the_command_prints_what_the_chapter_shows() -> None:
    experiment = EXPERIMENTS[2]
    done = run(REPOSITORY / "run", "experiment", "3", stdin="", VENV=sys.prefix)
    assert done.output().splitlines() == printed("./run experiment 3")
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


@pytest.mark.long
def test_the_hook_of_chapter_10(mnist_dir: Path, folder: Path) -> None:
    """Its solution, in a copy of NeMo's step of the ladder, prints the norm that the page names."""
    chapter = CHAPTERS["docs/course/10_nemo.md"]
    (hook,) = blocks(chapter, "python")
    (norm,) = re.findall(r"the first norm is ([\d.]+)", chapter)
    text = (REPOSITORY / "ladder/4_nemo.py").read_text()
    before = "    def on_train_batch_end("
    printed = """f"{outputs['loss']:.9f}", """
    assert text.count(before) == text.count(printed) == 1
    text = text.replace(printed, printed + "float(self.norm), ").replace(
        before, f"{hook}\n{before}"
    )
    (folder / "build/norm.py").write_text(text)
    script = (sys.executable, "build/norm.py", "--steps", "2", "--output-dir", "build/norm")
    done = run(*script, cwd=folder, MNIST_DATA_DIR=str(mnist_dir), NEMO_REDIRECT_LOGS_TO_STDERR="1")
    assert float(done.output().splitlines()[0].split()[2]) == pytest.approx(float(norm), rel=1e-3)


@pytest.mark.long
def test_the_cure_of_chapter_11(folder: Path) -> None:
    """The planted fault shows under one of two layouts; the cure is right under both."""
    chapter = CHAPTERS["docs/course/11_is_it_right.md"]
    (cure,) = blocks(chapter, "python")
    plant = next(one for one in blocks(chapter, "bash") if "q_norm" in one)
    check = "./run check build/broken.py --layouts TP2,SP --json"
    script = plant[: plant.index("./run check")]
    data: dict[str, Any] = {"VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
    assert run("bash", "-euc", f"{script}{check}", cwd=folder, **data).status == 1
    layer, *use = cure.splitlines()
    file = folder / "build/broken.py"
    text = file.read_text()
    old = "self.q_norm = Norm(config, config.kv_channels)", "        q = self.q_norm(q)"
    assert [text.count(one) for one in old] == [1, 1]
    text = text.replace(old[0], layer.split("#")[0].strip()).replace(old[1], "\n".join(use))
    file.write_text(text)
    done = run("bash", "-euc", check, cwd=folder, **data)
    assert done.status == 0, done.out + done.err


#: The rows of the table of precisions: of each tensor, its type in bf16-mixed and in 32.
PRECISIONS = re.findall(
    r"^\| (.*?) \| (\w+) \| (\w+) \| ", CHAPTERS["docs/course/07_optimizer.md"], re.MULTILINE
)


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
        assert f"**{name}** ({version})" in COURSE
