"""docs/your_copy.md: each row is complete, and what is left after all rows still trains."""

import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.docs.pages import blocks, copy_project
from tests.scripts import REPOSITORY, read_csv, run
from tests.test_architecture import code_files, files_used

PAGE = (REPOSITORY / "docs" / "your_copy.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)+)", PAGE, re.MULTILINE))
SCRIPTS = ("model_pretrain.py", "model_finetune.py", "model_predict.py")
#: As the page says, these only show, measure or copy the rest; the tests come first.
LOOKS_ON = ("docs/", "benchmarks/", "template/", "tests/")
#: Puts the tutorial's other prediction script in the place of its own.
COPIED = "copy `template/tutorial/model_predict.py` over it"


@dataclass(frozen=True)
class Row:
    """A row of the page: what it is about, what to delete, and the edit of each file."""

    what: str
    loss: str
    paths: tuple[str, ...]
    edits: dict[str, str]

    def deletes(self, path: str) -> bool:
        return any(path == one or (one[-1] == "/" and path.startswith(one)) for one in self.paths)


def expand(path: str) -> Iterator[str]:
    """`a/{b,c}.py` as a/b.py and a/c.py."""
    parts = re.split(r"\{(.*?)\}", path)
    for chosen in product(*(part.split(",") if n % 2 else [part] for n, part in enumerate(parts))):
        yield "".join(chosen)


def rows(section: str) -> list[Row]:
    found = []
    for line in re.findall(r"^\| (.*) \|$", SECTIONS[section], re.MULTILINE)[1:]:
        what, loss, delete, *edit = (cell.strip() for cell in re.split(r"(?<!\\)\|", line))
        paths = [path for text in re.findall(r"`([^`]+)`", delete) for path in expand(text)]
        places = r"(?:^|; )((?:`[\w./]+`, )*`[\w./]+`): (.*?)(?=; `[\w./]+`(?:, `[\w./]+`)*: |$)"
        edits = {
            file: text
            for files, text in re.findall(places, "".join(edit).replace(r"\|", "|"))
            for file in re.findall(r"`([^`]+)`", files)
        }
        found.append(Row(what, loss, tuple(paths), edits))
    return found


DELETE_ONLY, WITH_EDIT, SEVERAL = map(
    rows, ("Delete only", "Delete, and edit a line or two", "Several edits")
)
ROWS = [*DELETE_ONLY, *WITH_EDIT, *SEVERAL]


@cache
def used_by(file: str) -> set[str]:
    return {str(path.relative_to(REPOSITORY)) for path in files_used(REPOSITORY / file)} - {file}


def test_the_page_has_its_rows() -> None:
    """Else the tests below could not fail."""
    assert [len(DELETE_ONLY) > 8, len(WITH_EDIT) > 4, len(SEVERAL) > 2] == [True] * 3
    assert {"megakit/models/transformer.py", "template/vit/"} <= {*DELETE_ONLY[6].paths}
    assert {*WITH_EDIT[1].edits} == {"model_pretrain.py", "model_finetune.py"}
    assert "megakit/job/run.py" in used_by("model_pretrain.py")  # by a name of megakit.job


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_a_row_names_all_that_it_concerns(row: Row) -> None:
    """What is deleted exists, and whatever else imports it is deleted or edited, too."""
    assert [path for path in (*row.paths, *row.edits) if not (REPOSITORY / path).exists()] == []
    gone = [row]
    if re.search(r"[Ff]irst delete|, after ", f"{row.what} {row.loss}"):
        gone += ROWS[: ROWS.index(row)]
    files = (str(path) for path in code_files() if path.suffix == ".py")
    left = [file for file in files if not any(one.deletes(file) for one in gone)]
    users = {file for file in left if any(row.deletes(used) for used in used_by(file))}
    users = {file for file in users if not file.startswith(LOOKS_ON)}
    if "megakit/nemo/tensorboard.py" in row.paths:
        # They import it in `logger`, which the edit leaves out.
        users -= {"megakit/job/run.py", "megakit/nemo/parts_of_run.py"}
    edited = {file for file in row.edits if file.endswith(".py")}
    assert users <= edited
    # What they name of a run or of a package is no import.
    assert edited - users <= {"model_components.py", "model_trainer.py"}


IMPORT_ALL = """
import importlib, pathlib
from megakit.runtime import use_accelerator

use_accelerator("cpu")
names = {
    ".".join(path.with_suffix("").parts)
    for folder in ("megakit", "mnist") for path in pathlib.Path(folder).rglob("[!_]*.py")
}
for name in sorted(names | {"model_components", "model_trainer"}):
    importlib.import_module(name)
print(pathlib.Path(importlib.import_module("megakit").__file__).parents[1])
"""


@pytest.mark.long
def test_what_is_left_trains(tmp_path: Path) -> None:
    """After the tests are replaced, and after all rows of the first two tables."""
    copy = copy_project(tmp_path / "project")
    (block,) = blocks(SECTIONS["The tests first"], "bash")
    replaced = run("bash", "-euc", block.replace("./run tests", ""), cwd=copy)
    assert replaced.status == 0, replaced.err
    assert "wheel" not in (copy / "tests/test_start.py").read_text().partition('"""\n')[2]
    for row in WITH_EDIT:
        carry_out(row, copy)
    for row in DELETE_ONLY:
        carry_out(row, copy)
    runs = tmp_path / "runs"
    with ThreadPoolExecutor() as pool:
        imported = pool.submit(run, sys.executable, "-c", IMPORT_ALL, cwd=copy)
        for script in SCRIPTS:
            steps = () if script == SCRIPTS[-1] else ("--dataset", "digits", "--max-steps", 2)
            run(sys.executable, script, *steps, "--output-dir", runs, cwd=copy).output()
    assert imported.result().output() == f"{copy}\n"
    assert len(read_csv(runs / "predict" / "predictions.csv")) == 300


def carry_out(row: Row, copy: Path) -> None:
    """Edits the files that a row names, and deletes what an earlier row has not deleted yet."""
    for file, text in row.edits.items():
        edit(copy / file, text)
    for path in row.paths:
        shutil.rmtree(copy / path, ignore_errors=True)
        if not path.endswith("/"):
            (copy / path).unlink(missing_ok=True)


def edit(path: Path, text: str) -> None:
    """Does what a cell says: copies the file, leaves out some code, or replaces some by other."""
    if text == COPIED:
        project = path.parent
        shutil.copy(project / "template/tutorial/model_predict.py", path)
        return
    for part in text.split("; "):
        pairs = re.findall(r"`([^`]+)` becomes `([^`]+)`", part)
        if part.startswith("without "):
            pairs = [(code, "") for code in re.findall(r"`([^`]+)`", part)]
        assert pairs, part
        for before, after in pairs:
            source = path.read_text()
            assert source.count(before) == 1, f"not once in {path.name}: {before}"
            is_line = not after and re.search(rf"^ *{re.escape(before)}(  #.*)?\n", source, re.M)
            source = source.replace(is_line[0], "", 1) if is_line else source.replace(before, after)
            path.write_text(source)
