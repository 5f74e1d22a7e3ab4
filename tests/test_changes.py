"""Changes of the reader's own files while a run is stopped half-way, or done: docs/adapting.md."""

import re
import shutil
from pathlib import Path

import pytest

from model_pretrain import PRETRAIN, PretrainOptions
from tests.docs.pages import read_page
from tests.fabricate import make_run, prepare_run
from tests.refusals import run_forked
from tests.scripts import REPOSITORY, read_json

PAGE = read_page("docs/adapting.md")
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


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A copy of the reader's own files, whose pretraining imports callbacks of the reader's."""
    shutil.copytree(
        REPOSITORY / "mnist", tmp_path / "mnist", ignore=shutil.ignore_patterns("__pycache__")
    )
    for path in REPOSITORY.glob("model_*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "my_callbacks.py").write_text("shrinks_to = 0.9\n")
    (tmp_path / "data.py").write_text("import sys\n")
    shutil.copy(REPOSITORY / "mnist" / "sizes.py", tmp_path)
    path = tmp_path / "model_pretrain.py"
    text = path.read_text().replace(
        "import sys", "import sys\n\nimport data\nimport my_callbacks", 1
    )
    path.write_text(text.replace("from mnist.sizes", "from sizes"))
    return path


def options_of(script: Path) -> PretrainOptions:
    return PretrainOptions(output_dir=script.parent / "runs", dataset="digits", accelerator="cpu")


def change(script: Path, what: str, file: str) -> None:
    path = script.parent / file
    source = path.read_text()
    old, new = EDITS[what]
    assert old in source
    path.write_text(source.replace(old, new, 1))


def test_a_resumed_run_names_and_records_changed_files(script: Path) -> None:
    run = make_run(PRETRAIN, options_of(script), (20,), done=False, script=script)
    for what, file, _ in TABLE:
        if what in ("a number in a callback", "a comment"):
            change(script, what, file)
    resumed = prepare_run(PRETRAIN, options_of(script), script)
    assert (resumed.resumed_step, resumed.changed) == (20, ["data.py", "my_callbacks.py"])
    changes = [{"step": 20, "files": resumed.changed}]
    assert read_json(run.path / "run.json")["changes"] == changes


@pytest.mark.parametrize(("what", "file", "named"), TABLE, ids=EDITS)
def test_a_run_that_is_done(what: str, file: str, named: str, script: Path) -> None:
    run = make_run(PRETRAIN, options_of(script), (20,), script=script)
    change(script, what, file)
    folder = script.parent
    options = ("--output-dir", folder / "runs", "--dataset", "digits", "--accelerator", "cpu")
    ended = run_forked(script, *options, folder=folder, cwd=folder)
    if named.startswith("--"):
        assert (ended.status, f"holds another run: {named}. Use" in ended.err) == (2, True)
        return
    told = f"pretrain is already done: {run.path}. --fresh starts over.\n"
    if named != "nothing":
        told += f"Changed since then: {named}.\n"
    assert (ended.status, ended.err) == (0, told)
