"""Photos of digits: each kind gives nearly the image that the clean stroke gives."""

import importlib
from types import ModuleType

import numpy as np
import pytest

from mnist import files as mnist_files
from mnist.photos import clean
from mnist.training_form import paper_of, to_training_form
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

    def test_every_kind_is_read(self, kinds):
        """Kinds with other strokes or a rotation: the largest difference is larger."""
        for kind in kinds.KINDS:
            for number in range(2):
                found = differences(kinds, kind, number, form)
                assert found < 130, (kind, number, found)


class TestClean:
    def test_drawings_stay(self):
        for ink, paper in ((40, 230), (255, 0), (0, 255)):
            drawing = with_bar(page(paper=paper), ink)
            assert clean(drawing, paper).pixels is drawing
        for image in DIGITS[:20]:
            assert clean(image, 0).pixels is image
            large = np.uint8(255) - image.repeat(10, 0).repeat(10, 1)
            assert clean(large, 255).pixels is large

    @pytest.mark.parametrize("sigma", [3, 30])
    def test_noise_alone_is_no_ink(self, sigma):
        noise = np.random.default_rng(0).normal(200, sigma, (240, 320))
        light = np.linspace(1, 0.7, 320)
        for grey in (noise, noise * light):
            with pytest.raises(ValueError, match="contains no ink"):
                clean(np.clip(grey, 0, 255).astype(np.uint8), 200)

    def test_specks(self):
        """Specks far from the digit would make it small."""
        specks = with_bar(page())
        for y, x in ((10, 10), (220, 300), (15, 290)):
            specks[y : y + 4, x : x + 4] = 60
        cleaned = clean(specks, 230)
        assert cleaned.changes == ("ink beside the digit removed",)
        assert np.array_equal(form(specks) > 127, form(with_bar(page())) > 127)

    @pytest.mark.parametrize(("sides", "brightness"), [((1,), 50), ((0, 1, 3), 130)])
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
