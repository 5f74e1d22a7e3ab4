"""Right answers for photos of digits, by kind of photo.

    python benchmarks/photos.py --data-dir PATH [--digits 100] [--write]

Trains the tutorial's classifier, makes photos from test images, and predicts the photos with
`model_predict.py --input`. A photo is the image, enlarged to a smooth stroke, as ink on paper under
a light. `--write` puts the table into RESULTS.md.
"""

import csv
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from chain import run
from numpy.typing import NDArray
from PIL import Image
from report import machine, parser_of, write_section
from scipy import ndimage  # type: ignore[import-untyped]
from times import SCRIPTS

from mnist.files import read_mnist

HEIGHT, WIDTH = 360, 480
UNCHANGED = "the test images themselves"


@dataclass(frozen=True)
class Kind:
    """What a photo has.

    Attributes:
        paper: Brightness of the paper; 255 is white.
        ink: Brightness of the ink.
        pen: Width of the pen, as a share of the digit's longer side; 0 keeps MNIST's strokes.
        size: Length of the digit's longer side, in pixels.
        place: Where the digit may be, as shares of the free height and width.
        light: Loss of light from one edge of the photo to the opposite edge, as a share.
        shadow: Loss of light beyond the edge of a shadow, as a share.
        noise: Standard deviation of the noise of each pixel.
        blur: Standard deviation of the blur in pixels.
        tilt: Rotation of the photo in degrees, at most, in both directions.
        lines: The axes that the paper has lines along.
        table: Share of a side that is a dark table, at most, on one to four sides of the paper.
        is_cropped: Whether the photo ends close to the digit.
    """

    paper: int = 234
    ink: int = 45
    pen: float = 0
    size: tuple[int, int] = (120, 220)
    place: tuple[float, float] = (0.35, 0.65)
    light: float = 0
    shadow: float = 0
    noise: float = 2
    blur: float = 0.7
    tilt: float = 0
    lines: tuple[int, ...] = ()
    table: float = 0
    is_cropped: bool = False


KINDS = {
    "flat scan": Kind(paper=255, noise=0),
    "thin pen": Kind(pen=0.025),
    "light falls by 40%": Kind(light=0.4),
    "edge of a shadow": Kind(shadow=0.35),
    "noise of 20": Kind(noise=20),
    "blur": Kind(blur=5),
    "tilt up to 10 degrees": Kind(tilt=10),
    "small, near a corner": Kind(size=(50, 80), place=(0, 0.05)),
    "cropped close to the digit, light": Kind(light=0.2, is_cropped=True),
    "chalk on a board": Kind(paper=60, ink=217),
    "dim room, light": Kind(paper=98, ink=33, light=0.15),
    "dark table in view, light, tilt": Kind(light=0.2, tilt=5, table=0.12),
    "ruled paper": Kind(lines=(0,)),
    "squared paper": Kind(lines=(0, 1)),
    "thin pen on squared paper, light, tilt": Kind(pen=0.025, light=0.2, tilt=5, lines=(0, 1)),
}


def make_photo(digit: NDArray[np.uint8], kind: Kind, random: np.random.Generator) -> Image.Image:
    """Makes a grey photo of a digit, uint8 (28, 28) with bright ink on 0."""
    stroke = drawn(digit, random.integers(*kind.size), kind.pen)
    size, page = max(stroke.shape), np.full((HEIGHT, WIDTH), float(kind.paper))
    for axis in kind.lines:  # a digit is as high as 1.5 to 3 distances of the lines
        distance = int(size / random.uniform(1.5, 3))
        page.swapaxes(0, axis)[np.arange(page.shape[axis]) % distance < 2] = 160
    y, x = (int(n * random.uniform(*kind.place)) for n in np.subtract(page.shape, stroke.shape))
    page[y : y + stroke.shape[0], x : x + stroke.shape[1]] *= 1 - stroke
    page[y : y + stroke.shape[0], x : x + stroke.shape[1]] += kind.ink * stroke
    for side in random.permutation(4)[: random.integers(1, 5)]:
        turned = np.rot90(page, side)  # a view of `page`
        turned[: int(len(turned) * random.uniform(0, kind.table))] = 75
    degrees = random.uniform(-kind.tilt, kind.tilt)
    page = ndimage.rotate(page, degrees, order=1, reshape=False, mode="nearest")

    angle = random.uniform(0, 2 * np.pi)
    rows, columns = np.mgrid[-0.5 : 0.5 : HEIGHT * 1j, -0.5 : 0.5 : WIDTH * 1j]
    along = 0.7 * (np.cos(angle) * rows + np.sin(angle) * columns)  # from -0.5 to 0.5
    page *= 1 - kind.light * (along + 0.5)
    page *= 1 - kind.shadow * np.clip(40 * (along - random.uniform(-0.2, 0.2)), 0, 1)
    page = ndimage.gaussian_filter(page, kind.blur) + random.normal(0, kind.noise, page.shape)
    if kind.is_cropped:
        page = page[max(y - 8, 0) :, max(x - 8, 0) :]
        page = page[: stroke.shape[0] + 16, : stroke.shape[1] + 16]
    return Image.fromarray(page.round().clip(0, 255).astype(np.uint8))


def drawn(digit: NDArray[np.uint8], size: int, pen: float) -> NDArray[np.float64]:
    """Returns a digit whose longer side has `size` pixels, as shares of ink, with smooth edges."""
    (box,) = ndimage.find_objects((digit > 40).astype(int))
    wide = np.pad(digit[box] / 255, 1)
    scale = size / max(wide.shape)
    field = ndimage.gaussian_filter(ndimage.zoom(wide, scale), scale / 4)
    if pen:  # a round pen, drawn along the middle of the stroke
        depth = ndimage.distance_transform_edt(field > 0.4)
        is_middle = depth > ndimage.uniform_filter(depth, 5) + 0.3
        return np.clip(pen * size / 2 + 0.5 - ndimage.distance_transform_edt(~is_middle), 0, 1)
    return np.clip((field - 0.42) * max(scale / 3, 1.5) + 0.5, 0, 1)


def write_photos(data_dir: Path, number: int, folder: Path, seed: int = 1) -> NDArray[np.int64]:
    """Writes test images, drawn by the seed, and their photos of each kind; returns the labels."""
    images, labels = read_mnist(data_dir, train=False)
    chosen = np.random.default_rng(seed).permutation(len(images))[:number]
    for place, image in enumerate(images[chosen]):
        Image.fromarray(image).save(folder / f"{UNCHANGED}, {place}.png")
        random = np.random.default_rng((seed, place))
        for name, kind in KINDS.items():
            make_photo(image, kind, random).save(folder / f"{name}, {place}.jpg", quality=85)
    return labels[chosen]


def number_right(runs: Path, labels: NDArray[np.int64]) -> Counter[str]:
    """Returns the number of right answers by kind, from the predictions of the photos."""
    right: Counter[str] = Counter()
    with (runs / "predict-input" / "predictions.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            kind, _, name = row["source"].rpartition(", ")
            right[kind] += int(row["prediction"]) == labels[int(Path(name).stem)]
    return right


def main() -> None:
    parser = parser_of("Right answers for photos of digits, by kind.")
    parser.add_argument("--digits", type=int, default=100, help="number of digits for each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs, photos = Path(folder, "runs"), Path(folder, "photos")
        photos.mkdir()
        labels = write_photos(options.data_dir, options.digits, photos)
        for script in SCRIPTS[:2]:
            run(script, "--data-dir", options.data_dir, "--output-dir", runs)
        run(SCRIPTS[2], "--output-dir", runs, "--input", photos)
        right = number_right(runs, labels)
    lines = [f"| photos | right of {options.digits} |", "|---|---|"]
    lines += [f"| {name} | {right[name]} |" for name in (UNCHANGED, *KINDS)]
    caption = machine("nemo_toolkit", "megatron-core", "pillow").partition("; ")[0]
    text = "\n".join(["## Photos of digits", "", f"{caption}.", "", *lines])
    print(text)
    if options.write:
        write_section("photos", text)


if __name__ == "__main__":
    main()
