"""Changes of the reader's own files while a run is stopped half-way, or done: docs/adapting.md."""

import re
import shutil
from pathlib import Path

import pytest

from tests.faults.harness import BEFORE_STEP, Fault, Training
from tests.refusals import run_forked
from tests.scripts import REPOSITORY, Result, read_json, run_script

PAGE = (REPOSITORY / "docs" / "adapting.md").read_text()
TABLE = re.findall(r"^\| ([^|]+) \| `(\S+\.py)` \| ([^|]+) \|$", PAGE, re.MULTILINE)

LOSS = "nn.functional.mse_loss", "nn.functional.l1_loss"
#: What is replaced by what, for each row of the table.
EDITS: dict[str, list[tuple[str, str]]] = {
    "the loss, from squared to absolute differences": [LOSS],
    "the split: the first 200 images left out": [
        ("    import torch\n", "    import torch\n    first = 200\n"),
    ],
    "the default of a width": [
        ("hidden_size: Annotated[int, SIZE] = 64", "hidden_size: Annotated[int, SIZE] = 32")
    ],
    "a new option": [
        (
            "    corruption: Annotated",
            '    beta: float = 0.9\n    """Of mine."""\n\n    corruption: Annotated',
        )
    ],
    "the optimizer": [
        ("optimizer=megatron_adam(options.lr,", "optimizer=megatron_adam(options.lr / 2,")
    ],
    "comments, docstrings, formatting, the order of definitions": [
        (
            '"""Computes the mean squared error between images and their reconstructions.',
            '"""Squared.',
        ),
        ("class ExampleModelTrunk(", "# The trunk.\n\n\nclass ExampleModelTrunk("),
        (
            "self.linear2(self.relu(z))",
            "self.linear2(\n                self.relu(z),\n            )",
        ),
        ('TypeVar("ExampleModelT"', "TypeVar('ExampleModelT'"),
    ],
}
NOTHING = "comments, docstrings, formatting, the order of definitions"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a pretraining that was killed before its 25th step of 40."""
    training = Training(tmp_path_factory.mktemp("stopped"))
    assert training.start(Fault(BEFORE_STEP, 25)).status == -9
    return training.folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the files that are the reader's to change."""
    folder = tmp_path / "mine"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "mnist", folder / "mnist", ignore=ignored)
    for path in REPOSITORY.glob("model_*.py"):
        shutil.copy(path, folder)
    return folder


def change(project: Path, file: str, edits: list[tuple[str, str]]) -> None:
    source = (project / file).read_text()
    for old, new in edits:
        assert source.count(old) >= 1, old
        source = source.replace(old, new, 1)
    (project / file).write_text(source)


def start(project: Path, output_dir: Path, *options: object) -> Result:
    arguments = (*Training(output_dir).common, *options)
    return run_script(project / "model_pretrain.py", *arguments, PYTHONPATH=str(REPOSITORY))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_every_row_has_its_change() -> None:
    assert {row[0] for row in TABLE} == {*EDITS, "what TensorBoard shows", "callbacks and loggers"}


CHANGES = [row for row in TABLE if row[0] in EDITS and row[0] != NOTHING]


@pytest.mark.parametrize(
    ("row", "state"),
    [*((row, "stopped") for row in CHANGES), (CHANGES[0], "never_stopped_run")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_change_is_named(
    row: tuple[str, str, str], state: str, project: Path, request: pytest.FixtureRequest
) -> None:
    what, file, named = row
    output_dir: Path = request.getfixturevalue(state)
    before = contents(output_dir)
    change(project, file, EDITS[what])
    script, arguments = project / "model_pretrain.py", Training(output_dir).common
    ended = run_forked(script, *arguments, folder=project, cwd=project)
    assert ended.status == 2, ended.err
    names = named.replace("`", "")
    if names.startswith("--"):
        assert names in ended.err
    else:
        assert f"the code was changed since its last checkpoint: {names}. " in ended.err
        assert ("--keep-changes" in ended.err) is (state == "stopped")
    assert "--fresh" in ended.err
    assert contents(output_dir) == before


def test_what_computes_the_same_changes_nothing(
    project: Path, stopped: Path, never_stopped_run: Path, tmp_path: Path
) -> None:
    change(project, "model_components.py", EDITS[NOTHING])
    change(project, "mnist/views.py", [('batch["data"]', 'batch["data"][:, :1]')])
    ended = start(project, never_stopped_run)
    assert (ended.status, "is already done" in ended.err) == (0, True)
    shutil.copytree(stopped, tmp_path / "runs")
    ended = start(project, tmp_path / "runs")
    assert (ended.status, "Resuming from" in ended.err) == (0, True), ended.err
    runs = (tmp_path / "runs", never_stopped_run)
    here, there = ((run / "pretrain" / "metrics.csv").read_bytes() for run in runs)
    assert here == there


def test_keeping_a_change(project: Path, stopped: Path, tmp_path: Path) -> None:
    """The run goes on; what was changed, and after which step, stands in what it leaves."""
    shutil.copytree(stopped, tmp_path / "runs")
    change(project, "model_components.py", [LOSS])
    ended = start(project, tmp_path / "runs", "--keep-changes")
    assert ended.status == 0, ended.err
    assert "Resuming with changed code: MSELossReduction.forward." in ended.err
    changes = [{"step": 20, "names": ["MSELossReduction.forward"]}]
    run = tmp_path / "runs" / "pretrain"
    assert read_json(run / "run.json")["changes"] == changes
    assert read_json(run / "summary.json")["changes"] == changes
    ended = start(project, tmp_path / "runs")  # the changed code is the run's now
    assert (ended.status, "is already done" in ended.err) == (0, True)


@pytest.mark.long
def test_a_refused_fresh_start_leaves_the_old_run_in_its_place(
    project: Path, never_stopped_run: Path, tmp_path: Path
) -> None:
    """Only the model knows which values there are to choose by."""
    shutil.copytree(never_stopped_run, tmp_path / "runs")
    before = contents(tmp_path / "runs")
    ended = start(project, tmp_path / "runs", "--fresh", "--best-by", "val_mistyped")
    assert ended.status == 2, ended.err
    assert "--best-by val_mistyped: there is no such validated value." in ended.err
    assert f"The old run is {tmp_path / 'runs' / 'pretrain'} again." in ended.err
    assert contents(tmp_path / "runs") == before


@pytest.mark.long
def test_the_next_stage_says_that_its_start_is_of_old_code(
    project: Path, never_stopped_run: Path, tmp_path: Path
) -> None:
    change(project, "model_components.py", [LOSS])
    # A seed that the config does not get still decides the order of samples.
    change(project, "model_finetune.py", [("\n            seed=options.seed,", "")])
    shutil.copytree(never_stopped_run, tmp_path / "runs")
    ended = run_script(
        *(project / "model_finetune.py", "--dataset", "digits", "--output-dir", tmp_path / "runs"),
        *("--max-steps", 2, "--seed", 7),
        PYTHONPATH=str(REPOSITORY),
    )
    assert ended.status == 0, ended.err
    told = "The code of model_pretrain.py or of its imports has changed since it made"
    assert told in ended.err
    assert ": MSELossReduction.forward. " in ended.err


@pytest.mark.long
@pytest.mark.parametrize(
    ("edit", "options"),
    [
        pytest.param(
            ("ddp=Dist", "ckpt_async_save=True,\n        ddp=Dist"), (), id="asynchronous saves"
        ),
        pytest.param(
            ("ddp=Dist", "virtual_pipeline_model_parallel_size=2,\n        ddp=Dist"),
            ("--devices", 2, "--pipeline-parallel", 2),
            id="interleaved stages",
        ),
        pytest.param(
            (
                "    model_cls: type[PretrainModel]",
                '    cuda_graph_scope: str = "full_iteration"\n    model_cls: type[PretrainModel]',
            ),
            (),
            id="graph of a whole step",
        ),
    ],
)
def test_what_the_strategy_does_not_have_is_refused(
    project: Path, tmp_path: Path, edit: tuple[str, str], options: tuple[object, ...]
) -> None:
    change(project, "model_components.py", [edit])
    done = start(project, tmp_path / "runs", *options)
    assert done.status == 2
    assert done.err.count("ExactStrategy does not have this. Leave it out") == 1
