"""Figures, by what they show: their texts, their colours, and the PNG that comes of them."""

import io

import numpy as np
import pytest
from PIL import Image

from megakit.reporting import figures
from megakit.reporting.figure_style import CLASS_COLORS, to_png

#: Of labels 0, 0, 0, 1, 1, 2.
COUNTS = np.array([[2, 0, 1], [0, 2, 0], [0, 1, 0]])


def texts(figure):
    """All that a figure says, apart from the marks on its axes."""
    axes_texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    return [*axes_texts, *titles, figure.get_suptitle()]


def points_by_class(num_classes=10, dimensions=3):
    rng = np.random.default_rng(0)
    labels = np.arange(num_classes).repeat(20)
    middles = rng.normal(size=(num_classes, dimensions)) * 20
    return middles[labels] + rng.normal(size=(len(labels), dimensions)), labels


class TestConfusionMatrix:
    def test_counts_and_shares(self):
        figure = figures.confusion_matrix(COUNTS)
        at = {text.get_position(): text.get_text() for text in figure.axes[0].texts}
        counts = {
            position: text
            for position, text in at.items()
            if max(position) < 2.5 and text.isdigit()
        }
        # (predicted, label): a column, and a row
        assert counts == {(0, 0): "2", (2, 0): "1", (1, 1): "2", (1, 2): "1"}
        assert [at[2.6, row] for row in range(3)] == ["66.7%", "100.0%", "0.0%"]
        assert "66.67% of 6 predicted right" in texts(figure)

    def test_a_class_that_does_not_occur(self):
        assert "none" in texts(figures.confusion_matrix(np.pad(COUNTS, (0, 1))))


class TestMistakes:
    def test_the_most_confident_come_first(self):
        probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.1, 0.9], [0.3, 0.7]])
        labels = np.array([0, 0, 1, 0, 1])
        assert figures.most_confident_mistakes(labels, probabilities).tolist() == [3, 1, 2]
        assert figures.most_confident_mistakes(labels, probabilities, most=2).tolist() == [3, 1]


class TestLatentSpace:
    @pytest.mark.parametrize("dimensions", [2, 16])
    def test_classes_have_names_and_colours(self, dimensions):
        figure = figures.latent_space(*points_by_class(dimensions=dimensions))
        assert set(texts(figure)) >= {str(label) for label in range(10)}
        image = np.asarray(Image.open(io.BytesIO(to_png(figure))).convert("RGB"))
        shown = {tuple(color) for color in image.reshape(-1, 3).tolist()}
        for color in CLASS_COLORS:
            assert tuple(bytes.fromhex(color[1:])) in shown, color

    def test_one_dimension(self):
        with pytest.raises(ValueError, match="at least 2 dimensions"):
            figures.latent_space(np.zeros((5, 1)), np.zeros(5, np.int64))
