"""scikit-learn's digits: the same everywhere, split in fixed proportions, enlarged bilinearly."""

import hashlib
from typing import ClassVar

import numpy as np
import pytest

from mnist import digits as mnist_digits
from mnist.files import Split, find_dataset, read_digits
from tests.refusals import problems


class TestDigits:
    SIZES: ClassVar[dict[Split, int]] = {"train": 1297, "validation": 200, "test": 300}

    @pytest.mark.parametrize(
        ("split", "digest"),
        [
            ("train", "1f373dee74334ed1fa42dd2f8d4fe660cdfc10440c92ba5cec6d00db416cc62f"),
            ("validation", "1af3521d5b96222a5c548f63857776eabae4cb492ab21914eb81eb473e46d2d2"),
            ("test", "6d127dbc6685152055f76551c37c8ed3f1dc4f3ee73166f5f1bd8d6bc4349404"),
        ],
    )
    def test_are_the_same_everywhere(self, split, digest):
        images, labels = read_digits(split)
        count = self.SIZES[split]
        assert images.dtype == labels.dtype == np.uint8
        assert images.shape == (count, 28, 28)
        assert labels.shape == (count,)
        assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() == digest

    def test_scikit_learn_is_absent(self, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        for function, args in ((find_dataset, (tmp_path, "digits")), (read_digits, ("test",))):
            (problem,) = problems(function, *args)
            assert "not installed" in problem
            assert "--dataset mnist" in problem

    def test_scikit_learn_has_other_digits(self, tmp_path, monkeypatch):
        monkeypatch.setattr(mnist_digits, "DIGITS_SHA256", "0" * 64)
        assert "digits.csv.gz: sha256" in problems(find_dataset, tmp_path, "digits")[0]
