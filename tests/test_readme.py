"""The README keeps its word: its commands run, and give what it shows and promises."""

import json
import re
import sys
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
        """Each line shown came, but for its numbers, the processor's name and the precision."""

        def shape(line: str) -> str:
            line = re.sub(r" on .* \((cpu|gpu)\), .*", " on this machine", line)  # and precision
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


def test_every_percentage_comes_from_a_benchmark() -> None:
    percentages = re.findall(r"(\d+\.\d+)%", README)
    assert percentages
    assert set(percentages) <= set(re.findall(r"\d[\d,]*\.\d+", RESULTS))


# --- Figures ----------------------------------------------------------------------------------

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?")
#: Each figure of README's table, with the section of RESULTS.md and the name of the row in it.
README_FIGURES = {
    "95.5% to 96.4%": ("chain", "test accuracy"),
    "7.7 s": ("times", "./run tutorial"),
    "86 s": ("clone", "git clone and ./run tutorial"),
    "152 s": ("clone", "the same with pip"),
    "10 s": ("times", "the three scripts"),
    "36 s": ("times", "published: the three stages"),
    "6.4 times": ("steps", "the published tutorial's way, 1 thread(s)"),
    "1.38 times plain Lightning": ("steps", "plain Lightning, 1 thread(s)"),
    "1.16 times plain PyTorch": ("steps", "plain PyTorch, 1 thread(s)"),
    "0.93 with its fused AdamW": ("steps", "plain PyTorch with the fused AdamW, 1 thread(s)"),
}
#: Each figure of a page that is the text of a link to RESULTS.md, in the same form.
LINKED_FIGURES = {
    "2e-7": ("parallel", "DP2"),
    "4 s": ("fake_ranks", "`./run layout`: 1,024 ranks, TP4 x PP2"),
    "2.5 minutes": ("gpt", "the script, from start to end"),
}


def row_of_results(section: str, name: str) -> list[float]:
    """All numbers in a row of RESULTS.md, by the section's and the row's name."""
    part = RESULTS.partition(f"<!-- {section}: begin -->")[2].partition(f"<!-- {section}: end")[0]
    (cells,) = (
        row.strip("|").split("|")[1:] for row in part.splitlines() if row.startswith(f"| {name} |")
    )
    return [float(number.replace(",", "")) for number in NUMBER.findall(" ".join(cells))]


def rounds_to(figure: str, found: list[float]) -> bool:
    """Whether each number of a figure is one that was found, rounded as the figure is."""

    def form(text: str) -> str:
        places = len(text.partition(".")[2])
        return ".0e" if "e" in text else f",.{places}f"

    texts = NUMBER.findall(figure)
    rounded = [{f"{value:{form(text)}}".replace("e-0", "e-") for value in found} for text in texts]
    return all(text in values for text, values in zip(texts, rounded, strict=True))


class TestFigures:
    def test_figures_are_those_of_their_row(self) -> None:
        pages = [*REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("examples/*/README.md")]
        linked = "".join(page.read_text() for page in pages)
        assert all(figure in README for figure in README_FIGURES)
        assert all(f"[{figure}](" in linked for figure in LINKED_FIGURES)
        for figure, row in (*README_FIGURES.items(), *LINKED_FIGURES.items()):
            assert rounds_to(figure, row_of_results(*row)), row

    def test_other_figures_are_noticed(self) -> None:
        assert rounds_to("18 s", [18.3, 17.3])
        assert rounds_to("2e-7", [1.9e-7])
        assert not rounds_to("2e-7", [1.9e-8])
        assert not rounds_to("19 s", [18.3, 17.3])
        assert not rounds_to("95.4% to 96.4%", [96, 95.4, 96.3])
