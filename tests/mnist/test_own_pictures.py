"""A user's pictures: what comes out of each kind, worked out by hand, and what is refused."""

import numpy as np
import pytest
from PIL import Image

from megakit.errors import UserError
from mnist import files as mnist_files
from mnist.own_pictures import read_pictures
from mnist.training_form import to_training_form

DIGITS = mnist_files.read_digits("test")[0]


def stroke(height=28, width=28, paper=0, ink=255, rows=slice(5, 25), columns=slice(11, 19)):
    """A picture with one rectangle of ink; by default 20 x 8, placed as `to_training_form` does."""
    pixels = np.full((height, width), paper, np.uint8)
    pixels[rows, columns] = ink
    return pixels


def enlarged(pixels, scale):
    return np.kron(pixels, np.ones((scale, scale), np.uint8))


def negative(pixels):
    return 255 - pixels


def draw(path, pixels, mode=None, **options):
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    (image.convert(mode) if mode else image).save(path, **options)
    return path


class TestTrainingForm:
    def test_what_has_it_stays(self):
        for image in DIGITS:
            assert to_training_form(image) is image
        off_center = stroke(rows=slice(0, 5), columns=slice(0, 3))
        assert to_training_form(off_center) is off_center

    @pytest.mark.parametrize(("paper", "ink"), [(230, 30), (40, 240), (90, 122)])
    def test_any_paper_and_ink(self, paper, ink):
        """Ink becomes 255 and paper 0, whichever is the brighter, however little they differ."""
        assert np.array_equal(to_training_form(stroke(paper=paper, ink=ink)), stroke())

    @pytest.mark.parametrize("scale", [5, 31])
    def test_enlarged_pictures_shrink_exactly(self, scale):
        large = enlarged(stroke(), scale)
        assert np.array_equal(to_training_form(large), stroke())

    def test_small_pictures_grow(self):
        """A 5 x 2 rectangle on 9 x 9: four times as large it is 20 x 8."""
        small = stroke(9, 9, rows=slice(0, 5), columns=slice(3, 5))
        assert np.array_equal(to_training_form(small), stroke())

    def test_the_longer_side_becomes_20(self):
        """The shorter, 30 of 400 pixels, becomes 1.5 and so 2; the whole is centred."""
        wide = stroke(200, 500, 255, 0, rows=slice(50, 80), columns=slice(60, 460))
        expected = stroke(rows=slice(14, 16), columns=slice(5, 25))
        assert np.array_equal(to_training_form(wide), expected)

    def test_a_thin_line_stays(self):
        """Its width, a hundredth of its length, becomes one pixel."""
        line = stroke(120, 120, rows=slice(10, 110), columns=slice(60, 61))
        assert np.array_equal(
            to_training_form(line), stroke(rows=slice(5, 25), columns=slice(14, 15))
        )

    def test_centre_of_mass(self):
        """An L: a column 4 wide and 20 high on the left, a foot 4 high and 12 wide."""
        letter = np.zeros((300, 300), np.uint8)
        letter[100:300, 0:40] = 255
        letter[260:300, 0:120] = 255
        made = to_training_form(letter)
        ys, xs = np.nonzero(made)
        assert [np.ptp(ys) + 1, np.ptp(xs) + 1] == [20, 12]
        assert ys.mean() == pytest.approx(14, abs=0.5)
        assert xs.mean() == pytest.approx(14, abs=0.5)

    def test_it_stays_inside(self):
        """All mass at one end would push the other end out."""
        comet = np.zeros((200, 200), np.uint8)
        comet[0:20, 60:140] = 255
        comet[20:200, 98:102] = 60
        made = to_training_form(comet)
        assert np.ptp(np.nonzero(made)[0]) + 1 == 20
        assert made[8].any()
        assert not made[:8].any()

    def test_near_to_the_makers_of_mnist(self):
        """A digit that went through it comes out nearly as it was."""
        for image in DIGITS[:50]:
            again = to_training_form(negative(enlarged(image, 4)))  # of MNIST's size and place
            twice = to_training_form(negative(enlarged(again, 3)))
            assert np.abs(twice.astype(int) - again).max() <= 32

    @pytest.mark.parametrize(("level", "shape"), [(0, (28, 28)), (255, (50, 7)), (100, (1, 1))])
    def test_nothing_drawn(self, level, shape):
        with pytest.raises(ValueError, match="contains no ink"):
            to_training_form(np.full(shape, level, np.uint8))


class TestFiles:
    def test_folder_in_order_of_names(self, tmp_path):
        for number in (2, 0, 1):
            draw(tmp_path / f"{number}.png", DIGITS[number])
        (tmp_path / ".DS_Store").write_bytes(b"hidden")
        read = read_pictures(tmp_path)
        assert np.array_equal(read.images, DIGITS[:3])
        assert (read.sources, read.remarks) == (["0.png", "1.png", "2.png"], [])

    @pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
    def test_modes_of_grey(self, tmp_path, mode):
        read = read_pictures(draw(tmp_path / "a.png", stroke(), mode))
        assert np.array_equal(read.images[0], stroke())
        assert read.remarks == []

    def test_sixteen_bits(self, tmp_path):
        deep, expected = stroke().astype(np.uint16) * 257, stroke()
        deep[9, 14], expected[9, 14] = 129 * 257 - 57, 129  # nearer to 129 than to 128
        Image.fromarray(deep).save(tmp_path / "deep.png")
        read = read_pictures(tmp_path / "deep.png")
        assert np.array_equal(read.images[0], expected)
        assert "16 bits" in read.remarks[0]

    def test_colour(self, tmp_path):
        """Dark blue on light yellow, by its brightness."""
        is_ink = stroke()[..., None] > 0
        draw(tmp_path / "a.png", np.where(is_ink, [0, 0, 120], [255, 255, 200]))
        read = read_pictures(tmp_path / "a.png")
        assert np.array_equal(read.images[0], stroke())
        assert ["colour" in remark for remark in read.remarks] == [True, False, False]

    @pytest.mark.parametrize(("ink", "beneath"), [(0, 0), (255, 0)])
    def test_transparency_is_paper(self, tmp_path, ink, beneath):
        """Whatever the colour of the ink is, and whatever the one that is not seen."""
        grey = np.where(stroke() > 0, ink, beneath)
        draw(tmp_path / "a.png", np.stack([grey, grey, grey, stroke()], axis=-1))
        read = read_pictures(tmp_path / "a.png")
        assert np.array_equal(read.images[0] > 0, stroke() > 0)
        assert "1 of 1 pictures: transparent pixels count as paper." in read.remarks

    def test_turned_by_the_camera(self, tmp_path):
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by 90 degrees when shown
        lying = np.rot90(negative(enlarged(stroke(), 8)))
        draw(tmp_path / "a.jpg", lying, exif=exif)
        ys, xs = np.nonzero(read_pictures(tmp_path / "a.jpg").images[0] > 64)
        assert [np.ptp(ys) + 1, np.ptp(xs) + 1] == [20, 8]

    def test_remarks_count_each_kind(self, tmp_path):
        draw(tmp_path / "a.png", stroke())
        draw(tmp_path / "b.png", stroke(60, 60))
        draw(tmp_path / "c.png", stroke(paper=140, ink=0))
        assert sorted(read_pictures(tmp_path).remarks) == [
            "1 of 3 pictures: inverted, because the ink was dark.",
            "2 of 3 pictures: scaled to fit 20x20 pixels and centred in 28x28.",
        ]


class TestArrays:
    def save(self, folder, array):
        np.save(folder / "some.npy", array)
        return folder / "some.npy"

    def test_bytes(self, tmp_path):
        read = read_pictures(self.save(tmp_path, DIGITS[:3]))
        assert np.array_equal(read.images, DIGITS[:3])
        assert read.sources == ["some.npy[0]", "some.npy[1]", "some.npy[2]"]
        assert read.remarks == []

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_floats(self, tmp_path, dtype):
        read = read_pictures(self.save(tmp_path, (DIGITS[:3] / 255).astype(dtype)))
        assert np.array_equal(read.images, DIGITS[:3])
        assert read.remarks == ["3 of 3 pictures: values from 0 to 1 scaled to 0 to 255."]

    @pytest.mark.parametrize(
        ("array", "fault"),
        [
            (np.zeros((28, 28), np.uint8), r"shape \(28, 28\)"),
            (np.zeros((0, 28, 28), np.uint8), r"shape \(0, 28, 28\)"),
            (np.zeros((2, 28, 28), np.int64), "int64"),
            (np.full((2, 28, 28), 255.0), "255"),
            (np.full((2, 28, 28), np.nan), "nan"),
        ],
    )
    def test_refused(self, tmp_path, array, fault):
        with pytest.raises(UserError, match=rf"some\.npy: .*{fault}.*\(N > 0, 28, 28\)"):
            read_pictures(self.save(tmp_path, array))

    def test_elements_are_named(self, tmp_path):
        array = DIGITS[:4].copy()
        array[[1, 3]] = 7
        with pytest.raises(UserError) as refused:
            read_pictures(self.save(tmp_path, array))
        first, second = refused.value.problems
        assert "some.npy[1]: contains no ink" in first
        assert "some.npy[3]: contains no ink" in second


class TestRefusals:
    def put_strangers(self, folder):
        """Files that cannot be used, in the order of their names."""
        draw(folder / "blank.png", np.full((30, 30), 255))
        draw(folder / "cut.png", np.random.default_rng(0).integers(0, 255, (99, 99)))
        (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:3000])
        (folder / "drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
        (folder / "empty.jpg").touch()
        draw(folder / "film.png", stroke(), format="GIF")
        (folder / "more").mkdir()

    def test_each_file_by_name_and_all_at_once(self, tmp_path):
        self.put_strangers(tmp_path)
        with pytest.raises(UserError) as refused:
            read_pictures(tmp_path)
        beginnings = [
            *("blank.png: contains no ink", "cut.png: cannot be read"),
            *(
                "drawing.svg: cannot be read (neither PNG nor JPEG nor WEBP)",
                "empty.jpg: cannot be read (neither",
            ),
            *("film.png: cannot be read (neither", "more: cannot be read (Is a directory)"),
        ]
        for problem, beginning in zip(refused.value.problems, beginnings, strict=True):
            assert problem.startswith(f"--input {tmp_path}/{beginning}")

    def test_beside_a_picture_they_are_skipped_with_a_remark(self, tmp_path):
        self.put_strangers(tmp_path)
        draw(tmp_path / "good.png", stroke())
        (tmp_path / "last.txt").touch()
        read = read_pictures(tmp_path)
        assert read.sources == ["good.png"]
        assert np.array_equal(read.images, stroke()[None])
        assert read.remarks == [
            "Skipped 1 of 8 files, which contain no ink: blank.png.",
            "Skipped 6 of 8 files, which cannot be read: "
            "cut.png, drawing.svg, empty.jpg, film.png, last.txt and 1 more.",
        ]

    @pytest.mark.parametrize("name", ["blank.png", "cut.png"])
    def test_a_named_file_is_never_skipped(self, tmp_path, name):
        self.put_strangers(tmp_path)
        with pytest.raises(UserError, match=name):
            read_pictures(tmp_path / name)

    def test_empty_folder(self, tmp_path):
        with pytest.raises(UserError, match="folder is empty"):
            read_pictures(tmp_path)

    @pytest.mark.parametrize("name", ["none.png", "none.npy"])
    def test_missing(self, tmp_path, name):
        with pytest.raises(UserError, match=f"{name}: .*(missing|No such file)"):
            read_pictures(tmp_path / name)
