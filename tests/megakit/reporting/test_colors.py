"""Colours, by contrast and by how different they look to the colour-blind."""

import itertools

import numpy as np
import pytest

from megakit.reporting import figure_style as style
from megakit.reporting import report_parts
from megakit.reporting.page_colors import PAGE_COLORS, style_sheet

#: What linear RGB becomes to those who lack one kind of cone (Machado et al., 2009).
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
PALETTES = {"light": style.CLASS_COLORS, "dark": style.CLASS_COLORS_ON_DARK}


def seen_as(colors, blindness):
    """The CIE L*a*b* coordinates (N, 3) of colours, seen with a blindness."""
    rgb = np.array([list(bytes.fromhex(color[1:])) for color in colors]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.transpose(blindness), 0, 1)
    shares = seen @ TO_XYZ.T / TO_XYZ.sum(axis=1)
    x, y, z = np.where(shares > 216 / 24389, np.cbrt(shares), (24389 / 27 * shares + 16) / 116).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


def ciede2000(one, other):
    """The CIEDE2000 difference of L*a*b* coordinates (N, 3), as Sharma et al. (2005) define it."""
    (l1, a1, b1), (l2, a2, b2) = one.T, other.T
    chroma = ((np.hypot(a1, b1) + np.hypot(a2, b2)) / 2) ** 7
    stretch = 1.5 - 0.5 * np.sqrt(chroma / (chroma + 25**7))
    (c1, h1), (c2, h2) = (
        (np.hypot(a * stretch, b), np.degrees(np.arctan2(b, a * stretch)) % 360)
        for a, b in ((a1, b1), (a2, b2))
    )
    turn = np.where(c1 * c2 > 0, (h2 - h1 + 180) % 360 - 180, 0)
    hue_difference = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    lightness, c, h = (l1 + l2) / 2, (c1 + c2) / 2, np.where(c1 * c2 > 0, h1 + turn / 2, h1 + h2)
    waves = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(part * np.cos(np.radians(n * h + at)) for part, n, at in waves)
    away = (lightness - 50) ** 2
    for_lightness = (l2 - l1) / (1 + 0.015 * away / np.sqrt(20 + away))
    for_chroma = (c2 - c1) / (1 + 0.045 * c)
    for_hue = hue_difference / (1 + 0.015 * c * t)
    blue = 60 * np.exp(-((((h % 360) - 275) / 25) ** 2))
    rotation = -2 * np.sqrt(c**7 / (c**7 + 25**7)) * np.sin(np.radians(blue))
    return np.sqrt(for_lightness**2 + for_chroma**2 + for_hue**2 + rotation * for_chroma * for_hue)


def smallest_difference(colors, blindness):
    """The CIEDE2000 difference of the two most alike of some colours, seen with a blindness."""
    lab = seen_as(colors, BLINDNESS[blindness])
    pairs = np.array(list(itertools.combinations(range(len(lab)), 2)))
    return ciede2000(lab[pairs[:, 0]], lab[pairs[:, 1]]).min()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [  # of Sharma et al., table 1
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 0, 0), (50, -1, 2), 2.3669),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((22.7233, 20.0904, -46.694), (23.0331, 14.973, -42.5619), 2.0373),
        ((6.7747, -0.2908, -2.4247), (5.8714, -0.0985, -2.2286), 0.6377),
    ],
)
def test_the_measure(one, other, expected):
    assert ciede2000(np.array([one], float), np.array([other], float)) == pytest.approx(
        expected, abs=1e-4
    )


class TestClasses:
    @pytest.mark.parametrize("kind", BLINDNESS)
    @pytest.mark.parametrize("scheme", PALETTES)
    def test_stay_apart_for_the_colour_blind(self, scheme, kind):
        assert smallest_difference(PALETTES[scheme], kind) > 15.5

    def test_not_all_colours_do(self):
        import matplotlib

        usual = [matplotlib.colors.to_hex(c) for c in matplotlib.color_sequences["tab10"]]
        assert smallest_difference(usual, "protanopia") < 5

    @pytest.mark.parametrize("number", range(10))
    def test_contrast(self, number):
        light, dark = PAGE_COLORS["card"]
        assert style.contrast(style.CLASS_COLORS[number], light) >= 3
        assert style.contrast(style.CLASS_COLORS_ON_DARK[number], dark) >= 3

    @pytest.mark.parametrize(("good", "bad"), [PAGE_COLORS["right"], PAGE_COLORS["wrong"]])
    def test_right_and_wrong_differ_from_each_other(self, good, bad):
        for scheme in (0, 1):
            pair = [PAGE_COLORS["right"][scheme], PAGE_COLORS["wrong"][scheme]]
            assert min(smallest_difference(pair, kind) for kind in BLINDNESS) > 20


@pytest.mark.parametrize("scheme", [0, 1])
class TestPage:
    @pytest.mark.parametrize("ground", ["ground", "card"])
    @pytest.mark.parametrize("text", ["ink", "soft", "wrong"])
    def test_contrast_of_text(self, text, ground, scheme):
        assert style.contrast(PAGE_COLORS[text][scheme], PAGE_COLORS[ground][scheme]) >= 4.5

    @pytest.mark.parametrize("name", ["edge", "focus", "right", "wrong", "rate"])
    def test_contrast_of_graphics(self, name, scheme):
        assert style.contrast(PAGE_COLORS[name][scheme], PAGE_COLORS["card"][scheme]) >= 3

    def test_charts_can_translate_a_scheme_into_the_other(self, scheme):
        colors = [pair[scheme] for pair in PAGE_COLORS.values()]
        others = {pair[1 - scheme] for pair in PAGE_COLORS.values()}
        assert len(set(colors)) == len(colors)
        assert not set(colors) & others

    def test_counts_on_their_cells(self, scheme):
        """Any share of right and of wrong predictions, as templates/report.html mixes them."""
        card = PAGE_COLORS["card"][scheme]
        for share in np.linspace(0, 1, 101):
            right = style.blend(style.GOOD, share, card)
            on_right = style.text_color(right) if scheme == 0 else "#ffffff"
            assert style.contrast(on_right, right) >= 4.5
            wrong = style.blend(style.BAD, (0.55, 0.9)[scheme] * share, card)
            assert style.contrast(PAGE_COLORS["ink"][scheme], wrong) >= 4.5


def test_the_cells_use_the_text_colour():
    """With half of the images right, black has more contrast; with nearly all, white."""
    page = report_parts.confusion_matrix(np.array([[5, 5], [1, 99]]))
    assert page.count('class="right"') == page.count('class="right deep"') == 1
    assert page.index('class="right"') < page.index('class="right deep"')


def test_contrast_as_wcag_defines_it():
    assert style.contrast("#ffffff", "#000000") == pytest.approx(21)
    assert style.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    assert style.blend("#ff0000", 0.5, "#0000ff") == "#800080"


def test_the_style_sheet_has_both_schemes():
    light, _, dark = style_sheet().partition("@media (prefers-color-scheme: dark)")
    assert f"--ink: {PAGE_COLORS['ink'][0]};" in light
    assert f"--ink: {PAGE_COLORS['ink'][1]};" in dark
