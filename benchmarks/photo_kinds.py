"""Makes photos of handwritten digits from MNIST images, for `photos.py`.

A photo is the image, enlarged to a smooth stroke, as ink on paper under a light. `KINDS` defines
what each kind of photo has. A seed determines every random choice.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

Grey = NDArray[np.float32]
Colour = tuple[int, int, int]
HEIGHT, WIDTH = 360, 480
WHITE: Colour = (236, 234, 228)
BLACK: Colour = (45, 45, 52)
BROWN: Colour = (95, 70, 50)
SUFFIXES = (".jpg", ".png", ".webp")


@dataclass(frozen=True)
class Kind:
    """What a photo has.

    Attributes:
        paper: Colour of the paper.
        ink: Colour of the ink.
        size: Shortest and longest length of the digit's longer side, in pixels.
        pen: Width of the pen, as a share of the digit's longer side; None keeps MNIST's strokes.
        light: Loss of light from one edge of the photo to the opposite edge, as a share.
        shadow: Loss of light beyond the edge of a shadow, as a share.
        noise: Standard deviation of the noise of each pixel and colour, of 255.
        blur: Radius of the blur in pixels.
        tilt: Largest rotation of the photo in degrees, in both directions.
        lines: `ruled` or `squared` paper, or none.
        has_table: Whether a dark table is in view, on one to four sides of the paper.
        is_off_centre: Whether the digit is in a corner of the photo.
        is_cropped: Whether the photo ends close to the digit.
        is_flat: Whether the paper has one brightness, as in a scan; otherwise it has a texture.
    """

    paper: Colour = WHITE
    ink: Colour = BLACK
    size: tuple[int, int] = (120, 220)
    pen: float | None = None
    light: float = 0
    shadow: float = 0
    noise: float = 2
    blur: float = 0.7
    tilt: float = 0
    lines: str = ""
    has_table: bool = False
    is_off_centre: bool = False
    is_cropped: bool = False
    is_flat: bool = False


FLAT = Kind(paper=(255, 255, 255), ink=(20, 20, 20), noise=0, is_flat=True)
KINDS = {
    "flat scan": FLAT,
    "thin pen": Kind(paper=(255, 255, 255), pen=0.018, noise=0, is_flat=True),
    "light falls by 5%": Kind(light=0.05),
    "light falls by 20%": Kind(light=0.2),
    "light falls by 40%": Kind(light=0.4),
    "edge of a shadow": Kind(shadow=0.35),
    "noise of 7": Kind(noise=7),
    "noise of 20": Kind(noise=20),
    "blur": Kind(blur=5),
    "tilt up to 10 degrees": Kind(tilt=10),
    "ruled paper": Kind(lines="ruled"),
    "squared paper": Kind(lines="squared"),
    "small, in a corner": Kind(size=(50, 80), is_off_centre=True),
    "cropped close to the digit, light, noise": Kind(light=0.2, noise=7, is_cropped=True),
    "blue on yellow": Kind(paper=(240, 226, 150), ink=(40, 60, 150)),
    "chalk on a board": Kind(paper=(40, 66, 54), ink=(215, 220, 212), noise=5),
    "dim room": Kind(paper=(104, 98, 88), ink=(34, 32, 34), noise=5, light=0.15),
    "thin pen on ruled paper, light, noise, tilt": Kind(
        pen=0.025, light=0.2, noise=7, tilt=5, lines="ruled"
    ),
    "dark table in view, light, tilt": Kind(light=0.2, tilt=5, has_table=True),
}


def make_photo(digit: NDArray[np.uint8], kind: Kind, seed: tuple[int, ...]) -> Image.Image:
    """Makes a photo of a digit.

    Args:
        digit: uint8 (28, 28), bright ink on 0.
        kind: What the photo has.
        seed: Determines all random choices.

    Returns:
        An RGB image of 480 x 360 pixels, or less if it is cropped.
    """
    random = np.random.default_rng(seed)
    stroke = drawn(digit, int(random.integers(*kind.size, endpoint=True)), kind.pen)
    ink = _placed(stroke, kind, random)
    paper = np.empty((HEIGHT, WIDTH, 3), np.float32)
    paper[:] = kind.paper
    if kind.lines:
        paper = _with_lines(paper, kind, max(stroke.shape), random)
    ink = ink[..., None]
    page = paper * (1 - ink) + np.array(kind.ink, np.float32) * ink
    if kind.has_table:
        page = _on_table(page, random)
    photo = _tilted(page, kind, random)
    photo = photo * _light(kind, random)[..., None]
    photo = np.asarray(
        Image.fromarray(_whole(photo)).filter(ImageFilter.GaussianBlur(kind.blur)), np.float32
    )
    made = Image.fromarray(_whole(photo + random.normal(0, kind.noise, photo.shape)))
    return made.crop(_close_box(ink[..., 0] > 0.5)) if kind.is_cropped else made


def save_photo(photo: Image.Image, path: Path) -> None:
    """Saves a photo as JPEG, PNG or WebP; the suffix of the path is one of `SUFFIXES`."""
    photo.save(path, quality=85)


def drawn(digit: NDArray[np.uint8], size: int, pen: float | None) -> Grey:
    """Returns a digit whose longer side has `size` pixels, as shares of ink, with smooth edges."""
    rows, columns = (np.flatnonzero((digit > 40).any(axis=axis)) for axis in (1, 0))
    cut = digit[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = size / max(cut.shape)
    wide = Image.fromarray(np.pad(cut, 2))
    shape = (round(wide.width * scale), round(wide.height * scale))
    smooth = wide.resize(shape, Image.Resampling.BICUBIC)
    field = np.asarray(smooth.filter(ImageFilter.GaussianBlur(scale / 4)), np.float32) / 255
    if pen is not None:
        return _with_pen(field > 0.4, pen * size)
    return np.clip((field - 0.42) * max(scale / 3, 1.5) + 0.5, 0, 1).astype(np.float32)


def _with_pen(mask: NDArray[np.bool_], width: float) -> Grey:
    """Draws the middle line of a stroke with a round pen of a width in pixels."""
    line = thinned(mask)
    radius = width / 2
    reach = int(np.ceil(radius)) + 1
    padded = np.pad(line, reach)
    ink = np.zeros(padded.shape, np.float32)
    for y in range(-reach, reach + 1):
        for x in range(-reach, reach + 1):
            share = float(np.clip(radius + 0.5 - np.hypot(y, x), 0, 1))
            if share:
                np.maximum(ink, share * np.roll(padded, (y, x), (0, 1)), out=ink)
    return ink


def thinned(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Thins strokes to lines one pixel wide (Zhang and Suen, 1984)."""
    mask = np.pad(mask, 1)
    offsets = [(-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1)]
    while True:
        before = mask.sum()
        for first, second in (((0, 2, 4), (2, 4, 6)), ((0, 2, 6), (0, 4, 6))):
            around = np.stack([np.roll(mask, (-y, -x), (0, 1)) for y, x in offsets])
            number = around.sum(axis=0)
            changes = (~around & np.roll(around, -1, axis=0)).sum(axis=0)
            is_edge = ~around[[*first]].all(axis=0) & ~around[[*second]].all(axis=0)
            mask = mask & ~((number >= 2) & (number <= 6) & (changes == 1) & is_edge)
        if mask.sum() == before:
            return mask


def _placed(stroke: Grey, kind: Kind, random: np.random.Generator) -> Grey:
    """Places a stroke on the page: near the middle, or in a corner."""
    height, width = stroke.shape
    free_y, free_x = HEIGHT - height, WIDTH - width
    if kind.is_off_centre:
        y, x = (free * random.choice([0.03, 0.97]) for free in (free_y, free_x))
    else:
        y, x = (free * random.uniform(0.35, 0.65) for free in (free_y, free_x))
    page = np.zeros((HEIGHT, WIDTH), np.float32)
    page[int(y) : int(y) + height, int(x) : int(x) + width] = stroke
    return page


def _close_box(ink: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Returns the left, top, right and bottom of a box around the ink, with narrow margins."""
    rows, columns = (np.flatnonzero(ink.any(axis=axis)) for axis in (1, 0))
    margin = max(4, round(0.06 * max(len(rows), len(columns))))
    left, top = max(0, columns[0] - margin), max(0, rows[0] - margin)
    return left, top, min(WIDTH, columns[-1] + margin), min(HEIGHT, rows[-1] + margin)


def _with_lines(paper: Grey, kind: Kind, size: int, random: np.random.Generator) -> Grey:
    """Draws blue-grey lines on paper: a digit is as high as 1.5 to 3 distances of the lines."""
    distance = size / random.uniform(1.5, 3)
    color = np.array([142, 160, 190], np.float32)
    for axis, length in ((0, HEIGHT), (1, WIDTH)):
        if axis == 1 and kind.lines != "squared":
            break
        from_line = (np.arange(length) - random.uniform(0, distance)) % distance
        share = np.clip(2 - np.minimum(from_line, distance - from_line), 0, 1)
        share = share.reshape([-1, 1, 1] if axis == 0 else [1, -1, 1]).astype(np.float32)
        paper = paper * (1 - share) + color * share
    return paper


def _on_table(page: Grey, random: np.random.Generator) -> Grey:
    """Replaces 4% to 12% of the page by a table, on one to four sides."""
    made = page.copy()
    for side in random.permutation(4)[: random.integers(1, 4, endpoint=True)]:
        turned = np.rot90(made, side)  # a view of `made`
        turned[: int(len(turned) * random.uniform(0.04, 0.12))] = BROWN
    return made


def _tilted(photo: Grey, kind: Kind, random: np.random.Generator) -> Grey:
    """Rotates the photo about its middle; the paper continues beyond its edges."""
    degrees = random.uniform(-kind.tilt, kind.tilt)
    if not kind.tilt:
        return photo
    margin = 60
    wide = np.pad(photo, [(margin, margin), (margin, margin), (0, 0)], mode="wrap")
    if not kind.lines:
        wide = np.pad(photo, [(margin, margin), (margin, margin), (0, 0)], mode="edge")
    turned = Image.fromarray(_whole(wide)).rotate(degrees, Image.Resampling.BICUBIC)
    return np.asarray(turned, np.float32)[margin:-margin, margin:-margin]


def _light(kind: Kind, random: np.random.Generator) -> Grey:
    """Returns the share of light at each pixel (HEIGHT, WIDTH)."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    angle = random.uniform(0, 2 * np.pi)
    along = np.cos(angle) * (x / WIDTH - 0.5) + np.sin(angle) * (y / HEIGHT - 0.5)
    along /= np.abs(np.cos(angle)) + np.abs(np.sin(angle))  # from -0.5 to 0.5
    light = 1 - kind.light * (along + 0.5)
    beyond = np.clip((along - random.uniform(-0.2, 0.2)) * WIDTH / 12 + 0.5, 0, 1)
    light *= 1 - kind.shadow * beyond
    if not kind.is_flat:  # paper is not perfectly even
        coarse = Image.fromarray(random.normal(1, 0.006, (9, 12)).astype(np.float32))
        light *= np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
    return light.astype(np.float32)


def _whole(photo: Grey) -> NDArray[np.uint8]:
    return np.clip(photo + 0.5, 0, 255).astype(np.uint8)
