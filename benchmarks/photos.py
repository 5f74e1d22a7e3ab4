"""Right answers for photos of digits, by kind of photo, with and without the clean-up.

    python benchmarks/photos.py --data-dir PATH [--digits 100] [--write]

Trains the tutorial's classifier, makes photos from test images (`photo_kinds.py`), and predicts the
photos with `model_predict.py --input`. The clean-up was tuned on training images only. `--write`
puts the table into RESULTS.md.
"""

import argparse
import contextlib
import csv
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from chain import SCRIPTS, run
from numpy.typing import NDArray
from photo_kinds import KINDS, SUFFIXES, make_photo, save_photo
from PIL import Image
from report import DATA_DIR, machine, write_section

from mnist.files import read_mnist
from mnist.training_form import to_training_form

GOAL = 90
UNCHANGED = "the test images themselves"


class Digits:
    """The test images that photos are made from.

    Args:
        data_dir: The folder with MNIST/raw.
        number: Number of images, drawn from the 10,000 without replacement.
        seed: Seed of the draw and of the photos.
    """

    def __init__(self, data_dir: Path, number: int, seed: int) -> None:
        images, labels = read_mnist(data_dir, train=False)
        chosen = np.sort(np.random.default_rng(seed).permutation(len(images))[:number])
        self.images, self.labels, self.seed = images[chosen], labels[chosen], seed

    def photo(self, kind: str, number: int) -> Image.Image:
        """Makes the photo of a digit, by the name of the kind and the number of the digit."""
        seed = (self.seed, list(KINDS).index(kind), number)
        return make_photo(self.images[number], KINDS[kind], seed)

    def write(self, folder: Path) -> None:
        """Writes the images, and the photos of each kind, as JPEG, PNG and WebP by turns."""
        for number, image in enumerate(self.images):
            Image.fromarray(image).save(folder / f"{UNCHANGED}, {number:03}.png")
            for kind in KINDS:
                suffix = SUFFIXES[number % len(SUFFIXES)]
                save_photo(self.photo(kind, number), folder / f"{kind}, {number:03}{suffix}")


def number_right(runs: Path, digits: Digits) -> Counter[str]:
    """Returns the number of right answers by kind, from the predictions of a folder."""
    right: Counter[str] = Counter()
    with (runs / "predict-input" / "predictions.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            kind, _, name = row["source"].rpartition(", ")
            right[kind] += int(row["prediction"]) == digits.labels[int(Path(name).stem)]
    return right


def write_uncleaned(folder: Path, to: Path) -> None:
    """Writes the training forms of photos without the clean-up; leaves out photos without ink."""
    for path in folder.iterdir():
        grey: NDArray[np.uint8] = np.asarray(Image.open(path).convert("L"))
        with contextlib.suppress(ValueError):  # contains no ink
            Image.fromarray(to_training_form(grey)).save(to / f"{path.stem}.png")


def table(digits: Digits, data_dir: Path, work: Path) -> list[str]:
    """Trains the classifier, predicts all photos, and returns the lines of the table."""
    common: list[object] = ["--output-dir", work / "runs"]
    for script in SCRIPTS[:2]:
        run(script, "--data-dir", data_dir, *common)
    photos, plain = work / "photos", work / "plain"
    for folder in (photos, plain):
        folder.mkdir()
    digits.write(photos)
    run(SCRIPTS[2], *common, "--input", photos)
    cleaned = number_right(work / "runs", digits)
    write_uncleaned(photos, plain)
    run(SCRIPTS[2], *common, "--input", plain)
    uncleaned = number_right(work / "runs", digits)
    number = len(digits.labels)
    lines = [f"| photos | right of {number} | without the clean-up |", "|---|---|---|"]
    names = [UNCHANGED, *KINDS]
    lines += [f"| {name} | {cleaned[name]} | {uncleaned[name]} |" for name in names]
    least = 100 * min(cleaned[name] for name in KINDS) / number
    return [
        *(*lines, ""),
        f"The lowest share of right answers is {least:.0f}%; the goal is {GOAL}% for each kind.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Right answers for photos of digits, by kind.")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    parser.add_argument("--digits", type=int, default=100, help="number of digits for each kind")
    parser.add_argument("--seed", type=int, default=1, help="seed of the digits and the photos")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    digits = Digits(options.data_dir, options.digits, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        lines = table(digits, options.data_dir, Path(folder))
    caption = machine("nemo_toolkit", "megatron-core", "pillow").partition("; ")[0]
    text = "\n".join(["## Photos of digits", "", f"{caption}.", "", *lines])
    print(text)
    if options.write:
        write_section("photos", text)


if __name__ == "__main__":
    main()
