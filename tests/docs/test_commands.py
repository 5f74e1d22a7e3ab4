"""Every command that a page shows in a block of bash runs, in a copy of the project.

`tests/test_readme.py` runs most commands of the README. `EXCEPTIONS` lists the commands that no
test can run here, with the reason.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.test_adapting import follow
from tests.scripts import REPOSITORY, run
from tests.test_readme import ELSEWHERE

BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: A command of `layout` and what the page shows of its output.
LAYOUT = re.compile(
    r"^\./run layout [^`]*```\n\n```(?:text)?\n(.*?)^```$", re.DOTALL | re.MULTILINE
)

#: Pages whose blocks of bash other tests run: test_adapting.py, models/test_export.py,
#: ladder/test_ladder.py, and `test_recipes` below.
COVERED = {"docs/adapting.md", "docs/inference.md", "docs/ladder.md", "docs/recipes.md"}


@dataclass(frozen=True)
class Left:
    """A command that is not run, named by a part of its line; with `is_block`, its whole block."""

    page: str
    text: str
    reason: str
    is_block: bool = False


EXCEPTIONS = (
    Left("README.md", "git clone REPOSITORY", "needs the network"),
    Left("README.md", "./run new ../my-model", "tests/docs/test_adapting.py runs it"),
    Left("CONTRIBUTING.md", "renew=(", "needs an index of packages", is_block=True),
    Left("CONTRIBUTING.md", "-m sphinx", "is a step of .ci/run"),
    Left("docs/parallelism.md", "REHEARSE_GPUS=2", "tests/rehearsal has such runs"),
    Left("examples/gpt/README.md", "runs/gpt-3", "tests/parallel has such a layout"),
    Left("examples/gpt/README.md", "runs/gpt-4", "tests/parallel has such a layout"),
    Left("template/files.md", "renew=(", "needs an index of packages", is_block=True),
    Left("docs/performance.md", "./run benchmarks steps", "takes 5 minutes"),
    Left("docs/performance.md", "./run benchmarks times", "takes 15 minutes"),
    Left("docs/performance.md", "benchmarks/gpu_check.sh", "needs a GPU"),
    Left("docs/porting.md", "ladder/newest.sh", "tests/ladder/test_newest.py runs it"),
    Left("examples/slurm/README.md", "sbatch examples/slurm", "needs a Slurm", is_block=True),
    Left("examples/slurm/README.md", "LAYOUT=", "needs a Slurm", is_block=True),
)

#: Text of a page, and what runs instead: shorter trainings of the same kind.
SUBSTITUTES = {
    "docs/parallelism.md": {
        "./run pretrain": "./run pretrain --max-steps 20",
        "./run finetune": "./run finetune --max-steps 20",
        "--max-steps 100": "--max-steps 10",
    },
    "docs/performance.md": {
        "--output-dir runs/profile": "--max-steps 20 --output-dir runs/profile"
    },
    "examples/gpt/README.md": {
        "gpt/model_pretrain.py ": "gpt/model_pretrain.py --max-steps 4 --limit-val-batches 2 ",
    },
    "examples/own_images/README.md": {
        "own_images/model_train.py": "own_images/model_train.py --max-steps 10",
    },
    "examples/vit/README.md": {
        "vit/model_pretrain.py": "vit/model_pretrain.py --max-steps 10 --limit-val-batches 2",
        "vit/model_finetune.py": "vit/model_finetune.py --max-steps 10 --limit-val-batches 2",
    },
}

#: What a page takes for granted, by the file's place in the project.
FILES = {
    "docs/datasets.md": {
        "my_package/my_module.py": (
            "from mnist.dataset import MNISTCustom\n"
            "from mnist.files import read_digits\n\n\n"
            "def make_dataset():\n"
            '    return MNISTCustom.from_arrays(*read_digits("test"))\n'
        )
    },
}


def pages() -> dict[str, str]:
    """The texts of all pages that have a block of bash, by their places."""
    places = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", "template/*.md")
    paths = sorted(path for place in places for path in REPOSITORY.glob(place))
    texts = {str(path.relative_to(REPOSITORY)): path.read_text() for path in paths}
    return {page: text for page, text in texts.items() if BLOCK.search(text)}


def lines_of(block: str) -> list[str]:
    """The lines of a block; a line that ends with a backslash is joined with the next line."""
    return [line for line in re.sub(r"\\\n\s*", "", block).splitlines() if line.strip()]


def programs(page: str, text: str) -> Iterator[str]:
    """The blocks of a page without the exceptions, with the substitutes."""
    left = [one for one in EXCEPTIONS if one.page == page]
    for block in BLOCK.findall(text):
        lines = lines_of(block)
        if any(one.text in line for one in left if one.is_block for line in lines):
            continue
        lines = [line for line in lines if not any(one.text in line for one in left)]
        if page == "README.md":  # tests/test_readme.py runs all others
            lines = [line for line in lines if ELSEWHERE.search(line)]
        program = "\n".join(lines)
        for before, after in SUBSTITUTES.get(page, {}).items():
            program = program.replace(before, after)
        if program:
            yield program


PROGRAMS = {page: list(programs(page, text)) for page, text in pages().items()}
CASES = [page for page, blocks in PROGRAMS.items() if blocks and page not in COVERED]


def copy_project(folder: Path) -> Path:
    """Copies the project's files into a folder, and returns the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split(b"\0")):
        source, target = REPOSITORY / os.fsdecode(name), folder / os.fsdecode(name)
        if source.is_file():  # a deleted file is listed until the next commit
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


@pytest.fixture
def copy(tmp_path: Path, mnist_dir: Path) -> Path:
    """A copy of the project's files, with MNIST and with the packages of this Python."""
    folder = copy_project(tmp_path / "project")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "data").symlink_to(mnist_dir.resolve())
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", CASES)
def test_commands_run(page: str, copy: Path) -> None:
    for name, content in FILES.get(page, {}).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(content)
    output = ""
    for program in PROGRAMS[page]:
        bash = ("bash", "-euo", "pipefail", "-c", f"exec 2>&1\n{program}")
        done = run(*bash, cwd=copy, timeout=900, VENV=sys.prefix, PYTHON=None)
        assert done.status == 0, f"{program}\n{done.out[-5000:]}"
        assert "is already done" not in done.out, f"trains nothing: {program}\n{done.out}"
        print(f"{done.seconds:.1f} s: {program}")
        output += done.out
    for shown in LAYOUT.findall(pages()[page]):
        assert shown in output


RECIPES = (REPOSITORY / "docs" / "recipes.md").read_text().split("\n## ")[1:]


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.partition("\n")[0])
def test_recipes(recipe: str, copy: Path) -> None:
    """Each recipe starts from the unchanged files."""
    follow(recipe, copy)
