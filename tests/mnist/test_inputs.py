"""What is shown of a user's pictures: remarks on odd ones, and the picture `inputs.png`."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from megakit.reporting.figure_style import BAD
from mnist import files as mnist_files
from mnist.inputs import COLUMNS, MOST_DRAWN, SCALE, Answer, draw_inputs, oddities, write_inputs

SURE = Answer("3", 0.99)


def with_bars(number: int, length: int = 20) -> np.ndarray:
    """An image with vertical bars, each 2 pixels wide."""
    image = np.zeros((28, 28), np.uint8)
    for bar in range(number):
        image[4 : 4 + length, 4 + 5 * bar : 6 + 5 * bar] = 255
    return image


class TestOddities:
    def test_each_kind(self) -> None:
        assert oddities(with_bars(2), SURE) == []
        full = np.full((28, 28), 255, np.uint8)
        assert oddities(with_bars(1, 10), SURE) == ["less ink than a digit"]
        assert oddities(full, SURE) == ["more ink than a digit"]
        assert oddities(with_bars(3), SURE) == ["more than 2 separate parts"]
        assert oddities(with_bars(2), Answer("3", 0.69)) == ["a probability below 70%"]

    def test_few_of_mnist_s_images_are_odd(self, mnist_dir: Path) -> None:
        images = mnist_files.read_mnist(mnist_dir, train=False)[0][:2000]
        odd = [image for image in images if oddities(image, SURE)]
        assert len(odd) < 0.01 * len(images)


class TestDrawing:
    def test_every_image_is_shown_as_the_classifier_saw_it(self) -> None:
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (COLUMNS + 1, 28, 28)).astype(np.uint8)
        page = draw_inputs(images, ["name" * 30] * len(images), [SURE] * len(images))[..., 0]
        for image in images:
            large = image.repeat(SCALE, axis=0).repeat(SCALE, axis=1)
            height, width = large.shape
            corners = np.argwhere(page == large[0, 0])
            assert any(
                np.array_equal(page[y : y + height, x : x + width], large)
                for y, x in corners.tolist()
                if np.array_equal(page[y, x : x + width], large[0])
            )

    def test_odd_ones_are_marked(self) -> None:
        bad = tuple(bytes.fromhex(BAD[1:]))
        for answer, is_odd in ((SURE, False), (Answer("3", 0.4), True)):
            page = draw_inputs(with_bars(2)[None], ["a.png"], [answer])
            assert (page == bad).all(axis=2).any() == is_odd

    def test_the_number_drawn_is_bounded(self) -> None:
        images = np.stack([with_bars(2)] * (MOST_DRAWN + 40))
        names, answers = ["a"] * len(images), [SURE] * len(images)
        most = draw_inputs(images[:MOST_DRAWN], names, answers)
        more = draw_inputs(images, names, answers)
        assert more.shape == most.shape
        assert not np.array_equal(more, most)  # it says that 40 are left out


def test_the_answers_of_predictions_csv_and_a_remark_for_each_kind(tmp_path: Path) -> None:
    predictions, path = tmp_path / "predictions.csv", tmp_path / "inputs.png"
    images = np.stack([with_bars(2), *[with_bars(3)] * 7])
    names = [f"{number}, b.png" for number in range(8)]
    rows = [f'{n},"{name}",,4,0,0,0,0,{0.9 if n else 0.5}' for n, name in enumerate(names)]
    header = "idx,source,label,prediction,p0,p1,p2,p3,p4"
    predictions.write_text("\n".join([header, *rows, ""]))
    assert write_inputs(path, images, names, predictions) == [
        "Unlike MNIST's digits: 1 of 8 pictures, with a probability below 70%: 0, b.png.",
        "Unlike MNIST's digits: 7 of 8 pictures, with more than 2 separate parts: "
        "1, b.png, 2, b.png, 3, b.png, 4, b.png, 5, b.png and 2 more.",
        f"To see what the classifier saw, open {path}.",
    ]
    expected = draw_inputs(images, names, [Answer("4", 0.5), *[Answer("4", 0.9)] * 7])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(path.read_bytes()))), expected)
