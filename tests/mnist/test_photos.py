"""What is removed from photos, and what is not; tests/test_readme.py has every kind of photo."""

import io

import numpy as np
import pytest
from PIL import Image

from mnist import files as mnist_files
from mnist.photos import clean
from mnist.training_form import paper_of, to_training_form

DIGITS = mnist_files.read_digits("test")[0]


def form(grey):
    return to_training_form(clean(grey, paper_of(grey)).pixels)


def page(height=240, width=320):
    return np.full((height, width), 230, np.uint8)


def with_bar(pixels, rows=slice(60, 180), columns=slice(140, 170)):
    made = pixels.copy()
    made[rows, columns] = 40
    return made


def test_drawings_stay():
    for image in DIGITS[:20]:
        assert clean(image, 0).pixels is image
        large = np.uint8(255) - image.repeat(10, 0).repeat(10, 1)
        assert clean(large, 255).pixels is large


def test_specks():
    """Specks far from the digit would make it small."""
    specks = with_bar(page())
    for y, x in ((10, 10), (220, 300), (15, 290)):
        specks[y : y + 4, x : x + 4] = 60
    cleaned = clean(specks, 230)
    assert cleaned.changes == ("ink beside the digit removed",)
    assert np.array_equal(form(specks) > 127, form(with_bar(page())) > 127)


def test_a_pixel_of_a_large_drawing_is_no_part_of_the_digit():
    """Shrunken, it would be gone, and the digit of the whole drawing tiny."""
    drawing = np.full((2400, 2400), 255, np.uint8)
    drawing[600:1800, 1100:1250] = 0
    speck = drawing.copy()
    speck[20, 20] = 0
    assert clean(drawing, 255).pixels is drawing
    assert clean(speck, 255).changes == ("ink beside the digit removed",)
    assert np.array_equal(form(speck) > 127, form(drawing) > 127)


def test_a_table_beside_the_paper_is_no_digit():
    """On several sides; it is most of the border, and has much more ink than the digit."""
    table = with_bar(page()) * np.linspace(1, 0.8, 320)
    for side in (0, 1, 3):
        turned = np.rot90(table, side)
        turned[: len(turned) // 10] = 130
    grain = np.random.default_rng(0).normal(0, 2, table.shape)
    table = np.clip(table + grain, 0, 255).astype(np.uint8)
    assert clean(table, paper_of(table)).is_dark
    assert np.array_equal(form(table) > 127, form(with_bar(page())) > 127)


def test_a_digit_at_the_edge_alone_is_kept():
    cut = with_bar(page(), rows=slice(0, 120))
    assert clean(cut, 230).pixels is cut


def test_a_straight_1_from_edge_to_edge_is_no_line_of_the_paper():
    one = with_bar(page(120, 100), rows=slice(0, 120), columns=slice(48, 51))
    rows, columns = np.nonzero(form(one) > 127)
    assert np.ptp(rows) == 19
    assert np.ptp(columns) < 5


Y, X = np.mgrid[:240, :320] / 320
NOISE = np.random.default_rng(0).normal(0, 2, Y.shape)
LIGHT = 230 * (1 - 0.2 * X)
TEXTURE = (np.sin(20 * X) * np.sin(20 * Y) - 0.7).clip(0) / 0.3
DOTS = np.hypot(X % 0.1 - 0.05, Y % 0.1 - 0.05) < 0.007
RULED = np.abs((Y * 320 + X * 11) % 17 - 8.5) > 7.5
SQUARED = RULED | (np.abs((X * 320 - Y * 11) % 17 - 8.5) > 7.5)
EMPTY_SHEETS = {
    "even paper with texture": 240 + 9 * TEXTURE,
    "a board with texture": 45 - 9 * TEXTURE,
    "the sharp edge of a shadow": LIGHT * np.where(X + Y / 2 > 0.7, 0.6, 1) + NOISE,
    "the soft edge of a shadow": LIGHT * (1 - 0.4 * np.clip(12 * (X + Y / 2) - 8, 0, 1)) + NOISE,
    "the soft shadow of a thing in the middle": (
        LIGHT * (1 - 0.4 * np.exp(-(((X - 0.5) ** 2 + (Y - 0.4) ** 2) / 0.01))) + NOISE
    ),
    "light that falls toward the edges": LIGHT * (1 - (X - 0.5) ** 2 - (Y - 0.4) ** 2) + NOISE,
    "a table": np.where(Y > 0.05 + 0.02 * X, LIGHT, 60) + NOISE,
    "ruled": LIGHT * (1 - 0.35 * RULED) + NOISE,
    "squared": LIGHT * (1 - 0.35 * SQUARED) + NOISE,
    "faintly squared": LIGHT * (1 - 0.15 * SQUARED) + NOISE,
    "ruled, as in a scan": 255 * (1 - 0.35 * RULED),
    "dotted": LIGHT * (1 - 0.5 * DOTS) + NOISE,
}


@pytest.mark.parametrize("sheet", EMPTY_SHEETS)
def test_an_empty_sheet_has_no_ink(sheet):
    """Also a large one, and one from a camera."""
    grey = np.clip(EMPTY_SHEETS[sheet] + 0.5, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "JPEG", quality=80)
    for photo in (grey, grey.repeat(4, 0).repeat(4, 1), np.asarray(Image.open(file))):
        with pytest.raises(ValueError, match="contains no ink"):
            form(photo)


@pytest.mark.parametrize("sheet", EMPTY_SHEETS)
def test_a_digit_on_the_same_sheet_stays(sheet):
    paper = EMPTY_SHEETS[sheet]
    ink = 200 if sheet.startswith("a board") else 40
    paper = np.where((abs(X - 0.45) < 0.05) & (abs(Y - 0.4) < 0.2), ink, paper)
    rows, columns = np.nonzero(form(np.clip(paper + 0.5, 0, 255).astype(np.uint8)) > 127)
    assert np.ptp(rows) == 19
    assert np.ptp(columns) <= 6
