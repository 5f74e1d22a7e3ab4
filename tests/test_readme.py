"""The README keeps its word: its commands run, and give what it shows and promises."""

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import REPOSITORY, run

README = (REPOSITORY / "README.md").read_text()
RESULTS = (REPOSITORY / "benchmarks" / "RESULTS.md").read_text()
#: Shown, but for another machine, or for ever.
ELSEWHERE = re.compile(r"git clone|docker |setup |tensorboard|notebook|benchmarks|/new |run new")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Each block of commands as a script, without those for elsewhere."""
    scripts = []
    for block in blocks("bash"):
        lines = block.replace("\\\n", " ").splitlines()
        kept = [line for line in lines if line.strip() and not ELSEWHERE.search(line)]
        if kept:
            scripts.append("\n".join(kept))
    return scripts


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, mnist_dir: Path) -> tuple[Path, str]:
    """A folder in which all commands of the README have run, and what they told."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "run").symlink_to(REPOSITORY / "run")
    (folder / "data").symlink_to(mnist_dir.resolve())
    output = ""
    for script in commands():
        program = f"exec 2>&1\n{script}"
        bash = ("bash", "-euo", "pipefail", "-c", program)
        done = run(*bash, cwd=folder, timeout=1200, VENV=sys.prefix)
        assert done.status == 0, f"{script}\n{done.out}"
        output += done.out
    return folder, output


def accuracy(run: Path) -> float:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return 100 * float(summary["accuracy"])


def table(first: str) -> dict[str, list[float]]:
    """The percentages of a table's rows, by their first cell; `first` is in its header."""
    lines = README.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("|") and first in line)
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = [float(value) for cell in cells for value in re.findall(r"([\d.]+)%", cell)]
    return rows


@pytest.mark.long
class TestCommands:
    def test_accuracy(self, told: tuple[Path, str]) -> None:
        promised = table("on MNIST, at the defaults")["test accuracy, six seeds"]
        assert min(promised) - 1 <= accuracy(told[0] / "runs" / "predict") <= max(promised) + 1

    def test_few_labels(self, told: tuple[Path, str]) -> None:
        pretrained, fresh = (
            accuracy(told[0] / "runs" / name / "predict") for name in ("few", "few-fresh")
        )
        assert pretrained > fresh
        for reached, promised in zip(
            (pretrained, fresh), table("pretrained")["100 labels"], strict=True
        ):
            assert abs(reached - promised) < 9  # one seed, and the median of several

    def test_output(self, told: tuple[Path, str]) -> None:
        """Each line shown came, but for its numbers and the processor's name."""

        def shape(line: str) -> str:
            line = re.sub(r" on .* \((cpu|gpu)\)", " on this machine", line)
            return re.sub(r"\s+", " ", re.sub(r"[\d.,:]+|[━╌─╸╺]+", "#", line)).strip()

        printed = {shape(line) for line in told[1].replace("\r", "\n").splitlines()}
        shown = [
            line for block in blocks("console") for line in block.splitlines() if line != "..."
        ]
        assert shown
        missing = [
            line for line in shown if line.strip() not in ("", "...") and shape(line) not in printed
        ]
        assert not [line for line in missing if not line.lstrip().startswith("$")]

    def test_files(self, told: tuple[Path, str]) -> None:
        for block in blocks("text"):
            stage = ""
            for line in block.splitlines():
                match = re.match(r"(runs/\S+?/)?\s*(.*)", line)
                assert match is not None
                stage = match[1] or stage
                for name in match[2].split():
                    if (re.fullmatch(r"[\w.]+[/\w]", name) and "." in name) or name.endswith("/"):
                        assert (told[0] / stage / name).exists(), stage + name


@cache
def results() -> set[str]:
    return set(re.findall(r"\d[\d,]*\.\d+", RESULTS))


def test_every_percentage_comes_from_a_benchmark() -> None:
    percentages = re.findall(r"(\d+\.\d+)%", README)
    assert percentages
    assert [number for number in percentages if number not in results()] == []


def test_every_option_exists() -> None:
    options = set(re.findall(r"(?<!-)--([a-z][a-z-]+)", "\n".join(commands())))
    texts = "".join(
        path.read_text()
        for path in (
            *REPOSITORY.glob("*.py"),
            REPOSITORY / "megakit" / "job" / "options.py",
            *(REPOSITORY / "mnist").glob("*.py"),
            REPOSITORY / "run",
        )
    )
    assert options
    unknown = [
        o for o in options if f"{o.replace('-', '_')}:" not in texts and f"--{o}" not in texts
    ]
    assert unknown == []


def test_pictures_exist() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README) + re.findall(r'src="([^"]+)"', README)
    assert pictures
    for picture in pictures:
        assert (REPOSITORY / picture).is_file(), picture
