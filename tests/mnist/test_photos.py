"""Photos of digits: each kind gives nearly the image that the clean stroke gives; parts by hand."""

import contextlib
import importlib
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from mnist import files as mnist_files
from mnist.own_pictures import paper_of, read_pictures, to_training_form
from mnist.paper_lines import remove_lines
from mnist.photos import blurred, clean
from mnist.strokes import main_parts, parts_of, stroke_width, thickened
from tests.scripts import REPOSITORY

DIGITS = mnist_files.read_digits("test")[0]
#: Kinds whose strokes are as wide as MNIST's, and that the form without a clean-up misreads.
UNEVEN = (
    *("light falls by 20%", "light falls by 40%", "edge of a shadow", "noise of 20"),
    *("ruled paper", "squared paper", "dim room"),
)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's module that makes photos."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("photo_kinds")


def form(grey):
    return to_training_form(clean(grey, paper_of(grey)).pixels)


def grey_photo(kinds, kind, number):
    photo = kinds.make_photo(DIGITS[number], kinds.KINDS[kind], (1, number))
    return np.asarray(photo.convert("L"))


def stroke_alone(kinds, number):
    """The image of the digit's stroke, large, bright on 0, without a photo around it."""
    stroke = kinds.drawn(DIGITS[number], 180, None)
    return to_training_form(np.pad((255 * stroke).astype(np.uint8), 9))


def differences(kinds, kind, number, convert):
    """The mean difference of two images' pixels, of 255, where either has ink."""
    expected = stroke_alone(kinds, number).astype(int)
    made = convert(grey_photo(kinds, kind, number)).astype(int)
    return np.abs(made - expected)[(made > 0) | (expected > 0)].mean()


def page(height=240, width=320, paper=230):
    return np.full((height, width), paper, np.uint8)


def with_bar(pixels, ink=40, rows=slice(60, 180), columns=slice(140, 170)):
    made = pixels.copy()
    made[rows, columns] = ink
    return made


class TestKinds:
    @pytest.mark.parametrize("kind", UNEVEN)
    def test_uneven_photos_become_the_stroke(self, kinds, kind):
        cleaned = [differences(kinds, kind, number, form) for number in range(8)]
        assert np.median(cleaned) < 35, cleaned
        assert max(cleaned) < 80, cleaned

    @pytest.mark.parametrize("kind", UNEVEN)
    def test_without_the_clean_up_they_do_not(self, kinds, kind):
        """Otherwise the test above would not show what the clean-up does."""

        def uncleaned(grey):
            try:
                return to_training_form(grey)
            except ValueError:
                return np.zeros((28, 28), np.uint8)

        assert max(differences(kinds, kind, number, uncleaned) for number in range(8)) > 80

    def test_every_kind_is_read(self, kinds):
        """Kinds with other strokes or a rotation: the largest difference is larger."""
        for kind in kinds.KINDS:
            for number in range(3):
                found = differences(kinds, kind, number, form)
                assert found < 130, (kind, number, found)

    def test_thin_pens_get_the_width_of_mnist_s(self, kinds):
        for number in range(5):
            grey = grey_photo(kinds, "thin pen", number)
            cleaned = clean(grey, paper_of(grey))
            assert "thin strokes thickened" in cleaned.changes
            rows, columns = np.nonzero(cleaned.pixels > 127)
            longer = max(np.ptp(rows), np.ptp(columns))
            assert 0.08 < stroke_width(cleaned.pixels > 127) / longer < 0.16


class TestClean:
    def test_drawings_stay(self):
        for ink, paper in ((40, 230), (255, 0), (0, 255)):
            drawing = with_bar(page(paper=paper), ink)
            assert clean(drawing, paper).pixels is drawing
        for image in DIGITS[:20]:
            assert clean(image, 0).pixels is image
            large = np.uint8(255) - image.repeat(10, 0).repeat(10, 1)
            assert clean(large, 255).pixels is large

    def test_dark_ink_on_paper_that_is_not_bright(self):
        cleaned = clean(with_bar(page(paper=110)), 110)
        assert cleaned.is_dark
        assert cleaned.pixels[0, 0] == 0
        assert cleaned.pixels.max() == 255

    def test_bright_ink_under_uneven_light(self):
        """The board's light falls from 100 to 60; the chalk's with it."""
        light = np.linspace(1, 0.6, 320)
        grey = (with_bar(page(paper=100), 240) * light).astype(np.uint8)
        cleaned = clean(grey, paper_of(grey))
        assert not cleaned.is_dark
        assert np.array_equal(form(grey) > 127, form(with_bar(page())) > 127)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("sigma", [3, 12, 30])
    def test_noise_alone_is_no_ink(self, seed, sigma):
        noise = np.random.default_rng(seed).normal(200, sigma, (240, 320))
        light = np.linspace(1, 0.7, 320)
        for grey in (noise, noise * light):
            with pytest.raises(ValueError, match="contains no ink"):
                clean(np.clip(grey, 0, 255).astype(np.uint8), 200)

    @pytest.mark.parametrize("scale", [1, 3, 6])
    @pytest.mark.parametrize("sigma", [3, 5, 7, 15])
    def test_noise_that_shrinking_removes(self, scale, sigma):
        """Of a large picture; the paper of the shrunken picture is even."""
        large = np.kron(with_bar(page()), np.ones((scale, scale)))
        noise = np.random.default_rng(0).normal(0, sigma, large.shape)
        grey = np.clip(large + noise, 0, 255).astype(np.uint8)
        rows, columns = np.nonzero(form(grey) > 127)
        assert [np.ptp(rows) + 1, np.ptp(columns) + 1] == [20, 5]

    def test_specks(self):
        """Specks far from the digit would make it small."""
        specks = with_bar(page())
        for y, x in ((10, 10), (220, 300), (15, 290)):
            specks[y : y + 4, x : x + 4] = 60
        cleaned = clean(specks, 230)
        assert cleaned.changes == ("ink beside the digit removed",)
        assert np.array_equal(form(specks) > 127, form(with_bar(page())) > 127)

    @pytest.mark.parametrize("brightness", [50, 130, 250])
    @pytest.mark.parametrize("sides", [(0,), (1, 2), (0, 1, 3), (0, 1, 2, 3)], ids=str)
    def test_a_table_beside_the_paper_is_no_digit(self, sides, brightness):
        """On any sides; it is most of the border, and has much more ink than the digit."""
        table = with_bar(page()) * np.linspace(1, 0.8, 320)
        for side in sides:
            turned = np.rot90(table, side)
            turned[: len(turned) // 10] = brightness
        grain = np.random.default_rng(0).normal(0, 2, table.shape)
        table = np.clip(table + grain, 0, 255).astype(np.uint8)
        assert clean(table, paper_of(table)).is_dark
        assert np.array_equal(form(table) > 127, form(with_bar(page())) > 127)

    def test_a_digit_at_the_edge_alone_is_kept(self):
        cut = with_bar(page(), rows=slice(0, 120))
        assert clean(cut, 230).pixels is cut

    def test_a_straight_1_from_edge_to_edge_is_no_line_of_the_paper(self):
        one = with_bar(page(120, 100), rows=slice(0, 120), columns=slice(48, 51))
        rows, columns = np.nonzero(form(one) > 127)
        assert np.ptp(rows) == 19
        assert np.ptp(columns) < 5

    def test_large_photos_are_shrunk_first(self):
        """Of 12 million pixels."""
        small = with_bar(page(300, 400)) * np.linspace(1, 0.7, 400)
        large = np.asarray(Image.fromarray(small.astype(np.uint8)).resize((4000, 3000)))
        assert np.abs(form(large).astype(int) - form(small.astype(np.uint8))).max() < 80
        assert max(clean(large, 230).pixels.shape) < 200

    @pytest.mark.parametrize("seed", range(60))
    def test_nothing_but_no_ink_is_raised(self, seed):
        """For any shape, and for noise, steps and lines."""
        random = np.random.default_rng(seed)
        height, width = random.integers(1, [400, 400] if seed % 3 else [60, 2000])
        grey = np.full((height, width), random.integers(0, 256))
        for _ in range(seed % 4):
            y, x = random.integers(0, height), random.integers(0, width)
            grey[y : y + random.integers(1, height + 1), x : x + 50] = random.integers(0, 256)
        grey = grey + random.normal(0, [0, 1, 20, 100][seed // 4 % 4], grey.shape)
        grey = np.clip(grey, 0, 255).astype(np.uint8)
        made = None
        with contextlib.suppress(ValueError):
            made = form(grey)
        if made is None:
            with pytest.raises(ValueError, match=r"^contains no ink$"):
                form(grey)
        else:
            assert (made.shape, made.dtype, made.max() > 0) == ((28, 28), np.uint8, True)


class TestLines:
    @pytest.mark.parametrize("slope", [-0.15, 0, 0.1])
    def test_lines_go_and_strokes_stay(self, slope):
        """A stroke crosses three lines; it keeps its ink where it crosses them."""
        ink = np.zeros((240, 320), np.float32)
        columns = np.arange(320)
        for start in (60, 120, 180):
            rows = np.round(start + slope * (columns - 160)).astype(int)
            for width in (0, 1):
                ink[rows + width, columns] = 0.3
        clean_stroke = np.zeros_like(ink)
        clean_stroke[40:200, 150:165] = 0.8
        removed, number = remove_lines(np.maximum(ink, clean_stroke), 0.8, 0.01)
        assert number == 3
        assert np.array_equal(removed > 0.4, clean_stroke > 0.4)
        assert (removed[:, 200:] > 0.1).mean() < 0.002

    def test_lines_as_dark_as_the_stroke(self):
        ink = np.zeros((240, 320), np.float32)
        ink[100:103] = ink[40:200, 150:165] = 0.8
        removed, number = remove_lines(ink, 0.8, 0.01)
        assert number == 1
        assert (removed[40:200, 152:163] > 0.4).all()

    @pytest.mark.parametrize(
        "stroke",
        [
            (slice(100, 104), slice(40, 300)),  # does not reach the edges
            (slice(90, 120), slice(0, 320)),  # too thick for a line
            (slice(100, 103), slice(0, 180)),  # too short
        ],
    )
    def test_other_strokes_are_no_lines(self, stroke):
        ink = np.zeros((240, 320), np.float32)
        ink[stroke] = 0.8
        removed, number = remove_lines(ink, 0.8, 0.01)
        assert number == 0
        assert np.array_equal(removed, ink)


class TestStrokes:
    def test_parts_by_hand(self):
        """Two parts that touch at corners are one; a U is one although it begins as two."""
        mask = np.array([[int(c) for c in row] for row in ("1010011", "1010000", "1110100")]) > 0
        parts = parts_of(mask)
        assert len(parts) == 3
        assert parts.boxes.tolist() == [[0, 0, 2, 2], [0, 5, 0, 6], [2, 4, 2, 4]]
        assert parts.labels[1].tolist() == [0, -1, 0, -1, -1, -1, -1]
        assert parts.sums(np.full(mask.shape, 2, np.float32)).tolist() == [14, 4, 2]
        corners = parts_of(np.eye(5, dtype=bool))
        assert corners.boxes.tolist() == [[0, 0, 4, 4]]

    def test_parts_as_by_flooding(self):
        """Compared with a flood fill, on random masks."""
        random = np.random.default_rng(0)
        for share in (0.2, 0.4, 0.6):
            mask = random.random((30, 40)) < share
            labels = parts_of(mask).labels
            assert np.array_equal(labels >= 0, mask)
            assert len(parts_of(mask)) == number_flooded(mask)
            for y, x in ((0, 1), (1, 0), (1, 1), (1, -1)):
                there = mask & np.roll(mask, (-y, -x), (0, 1))
                there[:, -1] = there[:, 0] = there[-1] = False
                assert (labels == np.roll(labels, (-y, -x), (0, 1)))[there].all()

    def test_no_parts(self):
        assert len(parts_of(np.zeros((4, 5), bool))) == 0
        with pytest.raises(ValueError, match="contains no ink"):
            main_parts(np.zeros((4, 5), bool), np.zeros((4, 5), np.float32))

    def test_a_part_near_the_digit_belongs_to_it(self):
        """The upper stroke of a 5, and a speck that is as near and too small."""
        mask = np.zeros((100, 100), bool)
        mask[30:80, 30:40] = mask[20:25, 45:60] = mask[50, 46] = mask[90:98, 90:98] = True
        kept = main_parts(mask, mask.astype(np.float32))
        assert kept[20:25, 45:60].all()
        assert not kept[50, 46]
        assert not kept[90:98, 90:98].any()

    def test_a_digit_that_the_edge_cuts_keeps_its_parts(self):
        """The inner part has a tenth of the ink. A table has more ink, and reaches a corner."""
        cut = np.zeros((100, 100), bool)
        cut[40:100, 30:46] = cut[20:26, 50:66] = True
        assert main_parts(cut, cut.astype(np.float32))[cut].all()
        beside_table = np.zeros((100, 100), bool)
        beside_table[40:60, 60:65] = beside_table[:, :20] = True
        kept = main_parts(beside_table, beside_table.astype(np.float32))
        assert kept[40:60, 60:65].all()
        assert not kept[:, :20].any()

    @pytest.mark.parametrize("width", [4, 10, 20])
    def test_width(self, width):
        mask = np.zeros((140, 60), bool)
        mask[20:120, 20 : 20 + width] = True
        assert stroke_width(mask) == pytest.approx(width, rel=0.2)

    def test_thick_strokes_stay(self):
        ink = np.zeros((120, 120), np.float32)
        ink[10:110, 50:65] = 1
        made, is_thickened = thickened(ink)
        assert not is_thickened
        assert stroke_width(made > 127) == pytest.approx(15, abs=3)

    def test_blurred(self):
        point = np.zeros((21, 21), np.float32)
        point[10, 10] = 1
        spread = blurred(point, 1.5)
        assert spread.sum() == pytest.approx(1)
        assert spread[10, 10] == pytest.approx(1 / (2 * np.pi * 1.5**2), rel=0.05)


def number_flooded(mask):
    """The number of connected parts, by a flood fill of one after the other."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}
    number = 0
    while left:
        number += 1
        front = [left.pop()]
        while front:
            y, x = front.pop()
            around = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= around
            front += around
    return number


class TestFiles:
    @pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
    def test_photos_in_every_format(self, kinds, tmp_path, suffix):
        photo = kinds.make_photo(DIGITS[0], kinds.KINDS["light falls by 40%"], (1, 0))
        kinds.save_photo(photo, tmp_path / f"a{suffix}")
        read = read_pictures(tmp_path / f"a{suffix}")
        assert "1 of 1 pictures: uneven light and noise of the paper removed." in read.remarks
        assert "1 of 1 pictures: inverted, because the ink was dark." in read.remarks
        expected = stroke_alone(kinds, 0).astype(int)
        assert np.abs(read.images[0] - expected)[expected > 0].mean() < 45
