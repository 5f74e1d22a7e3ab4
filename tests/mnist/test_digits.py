"""scikit-learn's digits: the same everywhere, split in fixed proportions, enlarged bilinearly."""

import hashlib
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from mnist import digits as mnist_digits
from mnist.files import Split, find_dataset, read_digits
from tests.hostile import MEGABYTE, bomb, no_file, problem, problems


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

    def test_parts_are_a_stratified_split_of_all(self):
        from sklearn.datasets import load_digits

        digits = load_digits()
        parts = {split: mnist_digits._digits_split(digits.target, split) for split in self.SIZES}
        assert sorted(np.concatenate(list(parts.values()))) == list(range(1797))
        for split, count in self.SIZES.items():
            exact = np.bincount(digits.target) * count / 1797
            # The third part is what is left, so two roundings add up in it.
            deviation = np.abs(np.bincount(digits.target[parts[split]]) - exact).max()
            assert deviation < (2 if split == "train" else 1)
            np.testing.assert_array_equal(read_digits(split)[1], digits.target[parts[split]])

    def test_enlarging_is_bilinear(self):
        torch = pytest.importorskip("torch")
        pixels = np.random.default_rng(0).integers(0, 17, (50, 8, 8))
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(pixels[:, None] * 255 / 16), size=(28, 28), mode="bilinear"
        )[:, 0]
        enlarged = mnist_digits._enlarge(pixels)
        assert np.abs(enlarged - expected.numpy()).max() <= 0.5 + 1e-9

    def test_enlarging_keeps_the_whole_range(self):
        assert (mnist_digits._enlarge(np.full((1, 8, 8), 16)) == 255).all()
        assert (mnist_digits._enlarge(np.zeros((1, 8, 8), int)) == 0).all()

    def test_scikit_learn_is_absent(self, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        for function, args in ((find_dataset, (tmp_path, "digits")), (read_digits, ("test",))):
            (problem,) = problems(function, *args)
            assert "not installed" in problem
            assert "--dataset mnist" in problem

    def test_scikit_learn_has_other_digits(self, tmp_path, monkeypatch):
        monkeypatch.setattr(mnist_digits, "DIGITS_SHA256", "0" * 64)
        assert "digits.csv.gz: sha256" in problems(find_dataset, tmp_path, "digits")[0]

    def test_a_hostile_file_of_scikit_learn(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "sklearn" / "datasets" / "data"
        folder.mkdir(parents=True)
        (folder.parents[1] / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "sklearn", raising=False)
        path = folder / "digits.csv.gz"
        for kind in ("fifo", "device"):
            no_file(path, kind)
            assert problem(read_digits, "test").startswith(f"{path}: cannot be read (")
        path.unlink()
        path.write_bytes(bomb(100 * MEGABYTE))
        assert "unpacks to more than 1,048,576 bytes" in problem(read_digits, "test")
