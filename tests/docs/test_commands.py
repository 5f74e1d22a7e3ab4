"""Commands that pages name exist; those of their blocks run, in a copy of the project."""

import re
import shlex
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import blocks, copy_project, lines_of, read_page, read_pages
from tests.docs.test_adapting import follow
from tests.scripts import REPOSITORY, run

INLINE = re.compile(r"`((?:\./run|(?:\.venv/bin/)?python) [^`]+)`")
#: A verb of the project that `./run new --from gpt` makes.
FOREIGN_VERBS = {"sample"}
#: Modules of other packages, and verbs whose options are those of other programs.
FOREIGN = {"ipykernel", "tensorboard", "tests", "setup", "notebook"}

#: Pages whose blocks of bash other tests run: test_readme.py, test_adapting.py, test_your_copy.py,
#: test_inference.py, exercises/test_exercises.py, and `test_recipes` below.
COVERED = {
    *("README.md", "docs/adapting.md", "docs/your_copy.md", "docs/inference.md"),
    *("docs/recipes.md", "docs/course/index.md"),
}
#: What is in lines that do not run here.
NOT_RUN = (
    *("renew", "newer", "sbatch"),  # need an index of packages, Slurm
    *("-m sphinx", "ladder/newest.sh"),  # .ci/run and tests/ladder run them
    *("./run benchmarks", "gpu_check.sh", "REHEARSE_GPUS=2"),  # take minutes, or need a GPU
    *("runs/gpt-3", "runs/gpt-4"),  # tests/parallel and README have such layouts
    "| tail -n 1",  # tests/docs/test_course.py runs the faults
    *(
        "--precision 32",
        "runs/one",
        "runs/stock",
    ),  # as in tests/test_compare.py and tests/faults/test_exact.py
)
#: What runs instead, on all pages: shorter trainings of the same kind.
SHORTER = {
    r"(\./run (?:pretrain|finetune)|cProfile .*model_pretrain\.py)": r"\1 --max-steps 10",
    r"(megatron/model_(?:pretrain|finetune)\.py)": r"\1 --max-steps 10 --dataset digits",
    r"(own_images/model_train\.py)": r"\1 --max-steps 10",
    r"(?<!layout examples/)(gpt/model_pretrain\.py)": r"\1 --max-steps 4 --limit-val-batches 2",
    r"(vit/model_(?:pretrain|finetune)\.py)": r"\1 --max-steps 4 --dataset digits",
}
#: What docs/data.md takes for granted.
MY_MODULE = """
from mnist.dataset import MNISTCustom
from mnist.files import read_digits

def make_dataset():
    return MNISTCustom.from_arrays(*read_digits("test"))
"""


def commands() -> list[str]:
    """The commands between backquotes of all pages, and those of `./run` in blocks."""
    found = set()
    for text in read_pages().values():
        found |= set(INLINE.findall(text))
        lines = [line for block in blocks(text, "bash") for line in lines_of(block)]
        found |= {line for line in lines if line.startswith("./run ")}
    return sorted(found)


@cache
def help_of(*words: str) -> str:
    """What a verb of `run` prints for `--help`; without a verb, the list of verbs."""
    return run(REPOSITORY / "run", *words, "--help", VENV=sys.prefix).output()


def problem(command: str) -> str | None:
    """What is wrong with a command; None if nothing is."""
    program, *words = shlex.split(re.split(r" 2>| \|\| | && ", command)[0], comments=True)
    if program == "./run":
        return problem_of_verb(*words)
    if words[0] == "-m":
        known = words[1] in FOREIGN or find_spec(words[1])
        return None if known else f"no module {words[1]}"
    return None if (REPOSITORY / words[0]).is_file() else f"no file {words[0]}"


def problem_of_verb(verb: str, *words: str) -> str | None:
    """What is wrong with `./run VERB words`; None if nothing is."""
    if verb in FOREIGN_VERBS:
        return None
    if not re.search(rf"^  {verb}\b", help_of(), re.MULTILINE):
        return f"no verb {verb}"
    if verb == "benchmarks":
        known = set(re.findall(r"[\w-]+", help_of(verb)))
        unknown = [w for w in words if w.islower() and w not in known]
    elif verb == "tests":
        here = ("", "template/tutorial", "template/common")  # of a copy
        unknown = [w for w in words if w.startswith("tests/")]
        unknown = [w for w in unknown if not any((REPOSITORY / at / w).exists() for at in here)]
    elif verb in FOREIGN or (verb in ("layout", "trace") and ".py" in " ".join(words)):
        return None  # `test_commands_run` runs it
    else:
        if verb == "trace":  # its options are those of the ladder's third step
            verb, words = (
                "ladder",
                ("gpt", "3", *words[1:]) if words[:1] == ("gpt",) else ("3", *words),
            )
        script = ["finetune" if verb == "layout" else verb]
        if verb == "ladder" and words[:1]:
            script += words[: 2 if words[0] == "gpt" else 1]  # each step has options of its own
        unknown = [w for w in words if w.startswith("--") and w not in help_of(*script)]
    return f"{verb}: no {', '.join(unknown)}" if unknown else None


@pytest.mark.long
def test_commands_exist() -> None:
    found = commands()
    assert {"./run predict --input my-digits/", "./run predict --output-dir runs/few"} < {*found}
    assert {command: reason for command in found if (reason := problem(command))} == {}


def program_of(text: str) -> str:
    """The commands of a page that run here, as one script."""
    lines = [line for block in blocks(text, "bash") for line in lines_of(block)]
    program = "\n".join(line for line in lines if not any(text in line for text in NOT_RUN))
    for before, after in SHORTER.items():
        program = re.sub(before, after, program)
    return program


PROGRAMS = {page: program_of(text) for page, text in read_pages().items()}


@pytest.fixture
def copy(tmp_path: Path, mnist_dir: Path) -> Path:
    """A copy of the project's files, with MNIST and with the packages of this Python."""
    folder = copy_project(tmp_path / "project")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "data").symlink_to(mnist_dir.resolve())
    (folder / "my_package").mkdir()
    (folder / "my_package" / "my_module.py").write_text(MY_MODULE)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", [p for p in PROGRAMS if PROGRAMS[p] and p not in COVERED])
def test_commands_run(page: str, copy: Path) -> None:
    bash = ("bash", "-euo", "pipefail", "-c", f"exec 2>&1\n{PROGRAMS[page]}")
    done = run(*bash, cwd=copy, timeout=900, VENV=sys.prefix, PYTHON=None)
    assert done.status == 0, f"{PROGRAMS[page]}\n{done.out[-5000:]}"
    assert "is already done" not in done.out, f"trains nothing: {done.out}"
    tables = r"^\./run (?:layout|trace) [^`]*```\n\n```(?:text)?\n(.*?)^```$"
    for shown in re.findall(tables, read_page(page), re.DOTALL | re.MULTILINE):
        assert shown in done.out


RECIPES = [part for part in read_page("docs/recipes.md").split("\n## ")[1:] if "```" in part]


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.partition("\n")[0])
def test_recipes(recipe: str, copy: Path) -> None:
    """Each recipe starts from the unchanged files."""
    follow(recipe, copy)
