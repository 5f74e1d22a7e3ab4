"""What is shown of a user's pictures: remarks on odd ones, and the picture `inputs.png`."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from megakit.reporting.figure_style import BAD
from mnist import files as mnist_files
from mnist.inputs import (
    CELL,
    COLUMNS,
    MOST_DRAWN,
    Answer,
    draw_inputs,
    oddities,
    read_answers,
    remarks_on,
    write_inputs,
)

SURE = Answer("3", 0.99)


def with_bars(number: int, length: int = 20) -> np.ndarray:
    """An image with vertical bars, each 2 pixels wide."""
    image = np.zeros((28, 28), np.uint8)
    for bar in range(number):
        image[4 : 4 + length, 4 + 5 * bar : 6 + 5 * bar] = 255
    return image


def colors(picture: np.ndarray) -> set[str]:
    pixels = np.unique(picture.reshape(-1, 3), axis=0)
    return {"#" + bytes(pixel.tolist()).hex() for pixel in pixels}


class TestOddities:
    def test_none_for_a_digit(self) -> None:
        assert oddities(with_bars(2), SURE) == []

    def test_each_kind(self) -> None:
        full = np.full((28, 28), 255, np.uint8)
        assert oddities(with_bars(1, 10), SURE) == ["less ink than a digit"]
        assert oddities(full, SURE) == ["more ink than a digit"]
        assert oddities(with_bars(3), SURE) == ["more than 2 separate parts"]
        assert oddities(with_bars(2), Answer("3", 0.69)) == ["a probability below 70%"]

    def test_few_of_mnist_s_images_are_odd(self, mnist_dir: Path) -> None:
        images = mnist_files.read_mnist(mnist_dir, train=False)[0][:2000]
        odd = [image for image in images if oddities(image, SURE)]
        assert len(odd) < 0.01 * len(images)

    def test_one_remark_for_each_kind(self) -> None:
        images = np.stack([with_bars(2), *[with_bars(3)] * 7])
        names = [f"{number}.png" for number in range(8)]
        answers = [Answer("1", 0.5), *[SURE] * 7]
        assert remarks_on(images, names, answers, "Look.") == [
            "Unlike MNIST's digits: 1 of 8 pictures, with a probability below 70%: 0.png.",
            "Unlike MNIST's digits: 7 of 8 pictures, with more than 2 separate parts: "
            "1.png, 2.png, 3.png, 4.png, 5.png and 2 more.",
            "Look.",
        ]
        assert remarks_on(images[:1], names[:1], [SURE], "Look.") == ["Look."]


class TestDrawing:
    def test_every_image_is_shown_as_the_classifier_saw_it(self) -> None:
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (COLUMNS + 1, 28, 28)).astype(np.uint8)
        page = draw_inputs(images, ["name"] * len(images), [SURE] * len(images))
        scale = CELL // 28
        for image in images:
            large = image.repeat(scale, axis=0).repeat(scale, axis=1)
            assert contains(page, large)

    def test_odd_ones_are_marked(self) -> None:
        usual = draw_inputs(with_bars(2)[None], ["a.png"], [SURE])
        odd = draw_inputs(with_bars(2)[None], ["a.png"], [Answer("3", 0.4)])
        assert BAD not in colors(usual)
        assert BAD in colors(odd)

    def test_the_number_drawn_is_bounded(self) -> None:
        images = np.stack([with_bars(2)] * (MOST_DRAWN + 40))
        names, answers = ["a"] * len(images), [SURE] * len(images)
        most = draw_inputs(images[:MOST_DRAWN], names, answers)
        more = draw_inputs(images, names, answers)
        assert more.shape == most.shape
        assert not np.array_equal(more, most)  # it says that 40 are left out


def contains(page: np.ndarray, image: np.ndarray) -> bool:
    height, width = image.shape
    grey = page[..., 0]
    corners = np.argwhere(grey == image[0, 0])
    return any(
        np.array_equal(grey[y : y + height, x : x + width], image)
        for y, x in corners.tolist()
        if np.array_equal(grey[y, x : x + width], image[0])
    )


def test_files(tmp_path: Path) -> None:
    """The answers are those of predictions.csv."""
    predictions = tmp_path / "predictions.csv"
    columns = ",".join(f"p{number}" for number in range(10))
    shares = ["0"] * 10
    shares[4], shares[9] = "0.62", "0.38"
    row = f'0,"a, b.png",,4,{",".join(shares)}'
    predictions.write_text(f"idx,source,label,prediction,{columns}\n{row}\n")
    assert read_answers(predictions) == [Answer("4", 0.62)]
    path = tmp_path / "inputs.png"
    remarks = write_inputs(path, with_bars(2)[None], ["a, b.png"], predictions)
    assert remarks[0].endswith("with a probability below 70%: a, b.png.")
    assert str(path) in remarks[1]
    expected = draw_inputs(with_bars(2)[None], ["a, b.png"], [Answer("4", 0.62)])
    drawn = np.asarray(Image.open(io.BytesIO(path.read_bytes())))
    assert np.array_equal(drawn, expected)
