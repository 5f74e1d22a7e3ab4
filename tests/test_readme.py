"""The README keeps its word: its commands run, and give what it shows and promises."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from mnist import files as mnist_files
from tests.docs.pages import blocks, lines_of, read_page, read_pages
from tests.scripts import REPOSITORY, read_csv, read_json, run, run_script

README = read_page("README.md")
RESULTS = read_page("benchmarks/RESULTS.md")
#: Shown, but for another machine, or for ever.
ELSEWHERE = re.compile(r"git clone|docker |setup |tensorboard|notebook|benchmarks|/new |run new")


def commands() -> str:
    """The README's commands as a script, without those for elsewhere; shorter under layouts."""
    lines = [line for block in blocks(README, "bash") for line in lines_of(block)]
    script = "\n".join(line for line in lines if not ELSEWHERE.search(line))
    return re.sub(
        "(run (?:pretrain|finetune))(?= .*runs/(?:one|two))", r"\1 --max-steps 20", script
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, mnist_dir: Path) -> tuple[Path, str]:
    """A folder in which all commands of the README have run, and what they told."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("run", "model_pretrain.py"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "data").symlink_to(mnist_dir.resolve())
    script = f"exec 2>&1\n{commands()}"
    done = run("bash", "-euo", "pipefail", "-c", script, cwd=folder, timeout=1200, VENV=sys.prefix)
    assert done.status == 0, done.out[-5000:]
    return folder, done.out


def accuracy(run: Path) -> float:
    return 100 * float(read_json(run / "summary.json")["accuracy"])


def promised(name: str) -> list[float]:
    """The percentages in the row of a table with this first cell."""
    (row,) = re.findall(rf"^\| {re.escape(name)} (\|.*)$", README, re.MULTILINE)
    return [float(value) for value in re.findall(r"([\d.]+)%", row)]


@pytest.mark.long
class TestCommands:
    def test_accuracy(self, told: tuple[Path, str], mnist_dir: Path) -> None:
        rows = read_csv(told[0] / "runs" / "predict" / "predictions.csv")
        assert [int(row["idx"]) for row in rows] == list(range(10_000))
        _, labels = mnist_files.read_mnist(mnist_dir, train=False)
        assert [int(row["label"]) for row in rows] == labels.tolist()
        shown = promised("test accuracy, six seeds")
        assert min(shown) - 1 <= accuracy(told[0] / "runs" / "predict") <= max(shown) + 1

    def test_few_labels(self, told: tuple[Path, str]) -> None:
        reached = [accuracy(told[0] / "runs" / name / "predict") for name in ("few", "few-fresh")]
        assert reached[0] > reached[1]
        for value, shown in zip(reached, promised("100 labels"), strict=True):
            assert abs(value - shown) < 9  # one seed, and the median of several

    def test_output(self, told: tuple[Path, str]) -> None:
        """Each line shown came, but for its numbers, the processor's name and the precision."""

        def shape(line: str) -> str:
            line = re.sub(r" on .* \((cpu|gpu)\), .*", " on this machine", line)  # and precision
            return re.sub(r"\s+", " ", re.sub(r"[\d.,:]+|[━╌─╸╺]+", "#", line)).strip()

        printed = {shape(line) for line in told[1].replace("\r", "\n").splitlines()}
        shown = [line for block in blocks(README, "console") for line in block.splitlines()]
        assert shown
        expected = [line for line in shown if line.strip() and line.strip()[0] not in "$."]
        assert [line for line in expected if shape(line) not in printed] == []


@pytest.mark.long
def test_photos_of_every_kind_are_recognized(
    told: tuple[Path, str], mnist_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 digits for each kind; the benchmark has 100."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    photos = importlib.import_module("photos")
    labels = photos.write_photos(mnist_dir, 40, tmp_path, seed=2)
    runs = told[0] / "runs"
    run_script("model_predict.py", "--output-dir", runs, "--input", tmp_path).output()
    right = photos.number_right(runs, labels)
    assert right.keys() == {photos.UNCHANGED, *photos.KINDS}
    assert min(right.values()) >= 32, right


def test_code_is_quoted_from_the_script() -> None:
    (shown,) = blocks(README, "python")
    assert shown in read_page("model_pretrain.py")


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?")
#: Each figure of README's table, with the section of RESULTS.md and the name of the row in it.
README_FIGURES = {
    "95.5% to 96.4%": ("chain", "test accuracy"),
    "10 s": ("times", "./run tutorial"),
    "60 s": ("clone", "git clone and ./run tutorial"),
    "122 s": ("clone", "the same with pip"),
    "| 1.10 |": ("steps-cpu", "plain PyTorch (1_torch.py)"),
    "| 0.92 |": ("steps-cpu", "plain PyTorch with the fused AdamW (1_torch.py)"),
    "| 1.24 |": ("steps-cpu", "plain Lightning (2_lightning.py)"),
    "| 1.48 |": ("steps-cpu", "Megatron-Core alone (3_megatron.py)"),
    "| 8.1 |": ("steps-cpu", "NeMo 2 alone, sample by sample (4_nemo.py)"),
    "| 0.88 | |": ("steps-cpu", "plain PyTorch, by hand"),
    "| 0.88 |": ("steps-gpu", "model_pretrain.py, micro batch 128"),
    "| 0.76 |": ("steps-gpu", "model_pretrain.py, micro batch 128"),
    "| 1.04 |": ("steps-gpu", "model_pretrain.py, micro batch 128"),
}
#: Each figure of a page that is the text of a link to RESULTS.md, in the same form.
LINKED_FIGURES = {
    "2e-7": ("parallel", "DP2"),
    "1.6 times": ("steps-cpu", "model_pretrain.py with MEGAKIT_STOCK=1"),
    "465 steps per second": ("steps-cpu", "plain PyTorch, by hand"),
    "455 steps per second": ("steps-cpu", "Megatron-Core alone (examples/megatron)"),
    "1.9 minutes": ("gpt", "the script, from start to end"),
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
    for text in NUMBER.findall(figure):
        form = ".0e" if "e" in text else f",.{len(text.partition('.')[2])}f"
        if text not in {f"{value:{form}}".replace("e-0", "e-") for value in found}:
            return False
    return True


def test_figures_are_those_of_their_row() -> None:
    linked = "".join(read_pages().values())
    assert all(figure in README for figure in README_FIGURES)
    assert all(f"[{figure}](" in linked for figure in LINKED_FIGURES)
    for figure, row in (*README_FIGURES.items(), *LINKED_FIGURES.items()):
        assert rounds_to(figure, row_of_results(*row)), row
