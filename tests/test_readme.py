"""The README keeps its word: its commands run, and give what it shows and promises."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mnist import files as mnist_files
from tests.scripts import REPOSITORY, read_csv, run, run_script

README = (REPOSITORY / "README.md").read_text()
RESULTS = (REPOSITORY / "benchmarks" / "RESULTS.md").read_text()
#: Shown, but for another machine, or for ever.
ELSEWHERE = re.compile(r"git clone|docker |setup |tensorboard|notebook|benchmarks|/new |run new")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Each block of commands as a script, without those for elsewhere; shorter under layouts."""
    scripts = []
    for block in blocks("bash"):
        lines = block.replace("\\\n", " ").splitlines()
        kept = [line for line in lines if line.strip() and not ELSEWHERE.search(line)]
        script = re.sub("(pretrain|finetune)(?= .*runs/two)", r"\1 --max-steps 20", "\n".join(kept))
        scripts += [script] if script else []
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
    def test_accuracy(self, told: tuple[Path, str], mnist_dir: Path) -> None:
        rows = read_csv(told[0] / "runs" / "predict" / "predictions.csv")
        assert [int(row["idx"]) for row in rows] == list(range(10_000))
        _, labels = mnist_files.read_mnist(mnist_dir, train=False)
        assert [int(row["label"]) for row in rows] == labels.tolist()
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


def draw_in_three_ways(image: np.ndarray, folder: Path, name: str) -> None:
    """As it is; large and black on nothing; and grey on white paper, off its middle, as JPEG."""
    Image.fromarray(image).save(folder / f"as-it-is {name}.png")
    large = np.asarray(Image.fromarray(image).resize((100, 100), Image.Resampling.BICUBIC))
    nothing = np.zeros_like(large)
    transparent = np.stack([nothing, nothing, nothing, large], axis=-1)
    Image.fromarray(transparent).save(folder / f"transparent {name}.png")
    page = np.full((160, 120), 240)
    page[40:140, 10:110] -= large // 4 * 3
    Image.fromarray(page.astype(np.uint8)).save(folder / f"on-paper {name}.jpg", quality=75)


def shares_right(runs: Path, pictures: Path, labels: np.ndarray) -> dict[str, float]:
    """The share of right answers by kind; a file is named by its kind and the image's number."""
    options = ("--output-dir", runs, "--input", pictures)
    run_script("model_predict.py", *options).output()
    right: dict[str, list[bool]] = {}
    for row in read_csv(runs / "predict-input" / "predictions.csv"):
        kind, _, name = row["source"].rpartition(" ")
        answers = right.setdefault(kind, [])
        answers.append(int(row["prediction"]) == labels[int(Path(name).stem)])
    return {kind: float(np.mean(answers)) for kind, answers in right.items()}


@pytest.mark.long
class TestPictures:
    """With the classifier of the README's commands."""

    def test_all_kinds_are_read_as_well(
        self, told: tuple[Path, str], mnist_dir: Path, tmp_path: Path
    ) -> None:
        """Within two points of the accuracy on the same images as they are."""
        images, labels = mnist_files.read_mnist(mnist_dir, train=False)
        for number in range(200):
            draw_in_three_ways(images[number], tmp_path, f"{number:03}")
        shares = shares_right(told[0] / "runs", tmp_path, labels)
        assert shares.keys() == {"as-it-is", "transparent", "on-paper"}
        assert min(shares.values()) >= shares["as-it-is"] - 0.02, shares

    def test_photos_of_every_kind(
        self,
        told: tuple[Path, str],
        mnist_dir: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Of 40 digits for each kind; the benchmark has 100."""
        monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        photos = importlib.import_module("photos")
        digits = photos.Digits(mnist_dir, 40, seed=2)
        digits.write(tmp_path)
        options = ("--output-dir", told[0] / "runs", "--input", tmp_path)
        run_script("model_predict.py", *options).output()
        right = photos.number_right(told[0] / "runs", digits)
        assert right.keys() == {photos.UNCHANGED, *photos.KINDS}
        assert min(right.values()) >= right[photos.UNCHANGED] - 5, right


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


def test_figures_are_those_of_their_row() -> None:
    pages = [*REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("examples/*/README.md")]
    linked = "".join(page.read_text() for page in pages)
    assert all(figure in README for figure in README_FIGURES)
    assert all(f"[{figure}](" in linked for figure in LINKED_FIGURES)
    for figure, row in (*README_FIGURES.items(), *LINKED_FIGURES.items()):
        assert rounds_to(figure, row_of_results(*row)), row
