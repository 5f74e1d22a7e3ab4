"""What is shown of a user's pictures: remarks on odd ones, and the picture `inputs.png`."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from mnist import files as mnist_files
from mnist.inputs import Answer, draw_inputs, oddities, write_inputs

SURE = Answer("3", 0.99)


def with_bars(number: int, length: int = 20) -> np.ndarray:
    """An image with vertical bars, each 2 pixels wide."""
    image = np.zeros((28, 28), np.uint8)
    for bar in range(number):
        image[4 : 4 + length, 4 + 5 * bar : 6 + 5 * bar] = 255
    return image


def test_a_probability_is_rounded_down_to_a_tenth_of_a_percent() -> None:
    shown = [
        draw_inputs(with_bars(2)[None], ["3.png"], [Answer("3", probability)]).tobytes()
        for probability in (0.99, 0.999, 0.9996, 1.0)
    ]
    assert [image == shown[1] for image in shown] == [False, True, True, False]


def test_each_kind() -> None:
    assert oddities(with_bars(2), SURE) == []
    full = np.full((28, 28), 255, np.uint8)
    assert oddities(with_bars(1, 10), SURE) == ["less ink than a digit"]
    assert oddities(full, SURE) == ["more ink than a digit"]
    assert oddities(with_bars(3), SURE) == ["more than 2 separate parts"]
    assert oddities(with_bars(2), Answer("3", 0.69)) == ["a probability below 70%"]


def test_few_of_mnist_s_images_are_odd(mnist_dir: Path) -> None:
    images = mnist_files.read_mnist(mnist_dir, train=False)[0][:2000]
    odd = [image for image in images if oddities(image, SURE)]
    assert len(odd) < 0.01 * len(images)


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
