"""Changes of the reader's own files while a run is stopped half-way, or done: docs/adapting.md."""

import re
import shutil
from pathlib import Path

import pytest

from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import prepare_run
from tests.faults.harness import BEFORE_STEP, Fault, Training
from tests.left_behind import list_checkpoints
from tests.refusals import run_forked
from tests.scripts import REPOSITORY, Result, read_json

PAGE = (REPOSITORY / "docs" / "adapting.md").read_text()
TABLE = re.findall(r"^\| ([^|]+) \| `(\S+\.py)` \| `?(nothing|(?<=`)[^`]+)", PAGE, re.MULTILINE)

#: What is replaced by what, for each row of the table.
EDITS = {
    "the optimizer": ("options.lr,", "options.lr / 2,"),
    "the loss": ("nn.functional.mse_loss", "nn.functional.l1_loss"),
    "a number in a callback": ("0.9", "0.99"),
    "a comment": ("import sys", "# Mine.\nimport sys"),
    "a script that this one does not import": ("options.lr,", "options.lr / 2,"),
    "the default of an option": ("SIZE] = 64", "SIZE] = 32"),
}
CALLBACK = """
import lightning.pytorch as pl

class Shrink(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *more):
        for weight in pl_module.parameters():
            weight.data *= 0.999
"""


def change(project: Path, file: str, old: str, new: str) -> None:
    source = (project / file).read_text()
    assert old in source
    (project / file).write_text(source.replace(old, new, 1))


def copy_of(project: Path, folder: Path) -> Path:
    """A copy of the files that are the reader's to change."""
    shutil.copytree(
        project / "mnist", folder / "mnist", ignore=shutil.ignore_patterns("__pycache__")
    )
    for path in [*project.glob("model_*.py"), *project.glob("my_*.py")]:
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A pretraining whose script imports a callback that changes weights."""
    project = copy_of(REPOSITORY, tmp_path_factory.mktemp("mine"))
    (project / "my_callbacks.py").write_text(CALLBACK)
    change(
        *(project, "model_pretrain.py", "    from mnist.views"),
        "    from my_callbacks import Shrink\n    from mnist.views",
    )
    change(project, "model_pretrain.py", "callbacks=[", "callbacks=[Shrink(), ")
    return Training(tmp_path_factory.mktemp("runs"), str(project / "model_pretrain.py"))


@pytest.fixture(scope="module")
def resumed(training: Training) -> Result:
    """The end of this training, which was killed before step 25 of 40, after two changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        assert training.start(Fault(BEFORE_STEP, 25)).status == -9
        for what, file, _ in TABLE:
            if what in ("a number in a callback", "a comment"):
                change(Path(training.script).parent, file, *EDITS[what])
        return training.start()


def test_a_resumed_run_names_and_records_changed_files(training: Training, resumed: Result) -> None:
    names = ["mnist/views.py", "my_callbacks.py"]
    assert resumed.status == 0, resumed.err
    told = f"step=000020, step 20.\nChanged since it was saved: {', '.join(names)}.\n"
    assert f"Resuming from {training.checkpoints}/{told}" in resumed.err
    manifest = read_json(list_checkpoints(training.checkpoints)[-1] / "manifest.json")
    run, summary = (read_json(training.path / name) for name in ("run.json", "summary.json"))
    for record in (run, summary, manifest["run"]):
        assert record["changes"] == [{"step": 20, "files": names}]


@pytest.mark.usefixtures("resumed")
@pytest.mark.parametrize(("what", "file", "named"), TABLE, ids=EDITS)
def test_a_run_that_is_done(
    what: str, file: str, named: str, training: Training, tmp_path: Path
) -> None:
    project = copy_of(Path(training.script).parent, tmp_path)
    change(project, file, *EDITS[what])
    script, arguments = project / "model_pretrain.py", (*training.common, "--accelerator", "cpu")
    ended = run_forked(script, *arguments, folder=tmp_path, cwd=tmp_path)
    if named.startswith("--"):
        assert (ended.status, f"holds another run: {named}. Use" in ended.err) == (2, True)
        return
    told = f"pretrain is already done: {training.path}. --fresh starts over.\n"
    if named != "nothing":
        told += f"Changed since then: {named}.\n"
    assert (ended.status, ended.err) == (0, told)


@pytest.mark.usefixtures("resumed")
def test_a_notebook_has_no_files(training: Training) -> None:
    options = PretrainOptions(
        output_dir=training.folder, dataset="digits", max_steps=40, global_batch_size=256
    )
    run = prepare_run(PRETRAIN, options)
    assert (run.is_done, run.changed) == (True, [])
    assert run.identity == read_json(training.path / "run.json")
