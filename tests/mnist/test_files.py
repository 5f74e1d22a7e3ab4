"""MNIST's files, whole and spoilt, found, read and checked; most are made up by the tests."""

import gzip
import hashlib

import numpy as np
import pytest

from mnist import digits as mnist_digits
from mnist.files import (
    MNIST_SHA256,
    check_mnist,
    find_dataset,
    read_digits,
    read_mnist,
    read_splits,
)
from tests.mnist.made_up import (
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    content_of,
    files_below,
    link_files,
    made_up,
    replace,
)
from tests.refusals import problem, problems


class TestReading:
    @pytest.mark.parametrize(("train", "count"), [(True, 60_000), (False, 10_000)])
    def test_known_values(self, mnist_dir, train, count):
        images, labels = read_mnist(mnist_dir, train)
        assert images.shape == (count, 28, 28)
        assert labels[:5].tolist() == ([5, 0, 4, 1, 9] if train else [7, 2, 1, 0, 4])
        assert round(images.mean() / 255, 4) == (0.1307 if train else 0.1325)

    def test_known_checksums(self):
        """Those of the four files that LeCun, Cortes and Burges published, together."""
        together = hashlib.sha256(repr(sorted(MNIST_SHA256.items())).encode()).hexdigest()
        assert together == "b18f26934f2fc9d40a518d69373d8edabd4098da817943a60c8b5609867b2700"

    def test_the_split_is_the_published_one(self, made_up_mnist):
        train, validation, test = read_splits(made_up_mnist, "mnist", lambda *arrays: arrays[1])
        assert (len(train), len(validation)) == (55_000, 5_000)
        assert train.indices[:5] == [37542, 43087, 2992, 25810, 39634]
        assert validation.indices[:5] == [55299, 34709, 13174, 51723, 17718]
        assert sorted(train.indices + validation.indices) == [*range(60_000)]
        assert train.dataset is validation.dataset
        assert len(test) == 10_000

    @pytest.mark.parametrize(
        ("layout", "is_packed"), [("MNIST/raw", True), ("MNISTCustom/raw", False)]
    )
    def test_layouts(self, made_up_mnist, packed, tmp_path, layout, is_packed):
        if is_packed:
            (tmp_path / layout).mkdir(parents=True)
            for name, content in packed.items():
                (tmp_path / layout / name).write_bytes(content)
        else:
            link_files(made_up_mnist, tmp_path / layout)
        before = files_below(tmp_path)
        check_mnist(tmp_path)
        for train, names in (
            (True, (TRAIN_IMAGES, TRAIN_LABELS)),
            (False, (TEST_IMAGES, TEST_LABELS)),
        ):
            for found, name in zip(read_mnist(tmp_path, train), names, strict=True):
                np.testing.assert_array_equal(found, made_up(name))
        assert files_below(tmp_path) == before, "a folder that holds the files is only read"


class TestChecking:
    def test_what_is_used_is_what_was_checked(self, root):
        """A file that is replaced after the check is noticed by the ranks that read it."""
        path = root / "MNIST" / "raw" / TEST_LABELS
        assert find_dataset(root, "mnist") == "mnist"
        replace(path, b"\1" * 10_008)
        assert f"{path}: sha256 " in problem(read_mnist, root, False)

    @pytest.mark.parametrize(
        ("content", "fault"),
        [
            (gzip.compress(content_of(TEST_LABELS))[:-9], "ends before the end"),
            (gzip.compress(b"other"), "5 bytes, expected 10,008"),
        ],
        ids=["cut", "other"],
    )
    def test_packed_files(self, root, content, fault):
        path = root / "MNIST" / "raw" / TEST_LABELS
        path.unlink()
        path.with_name(f"{TEST_LABELS}.gz").write_bytes(content)
        path.with_name(TEST_IMAGES).unlink()
        missing, damaged = sorted(problems(find_dataset, root, "mnist"))
        assert f"{TEST_IMAGES}: missing" in missing
        assert fault in damaged


DIGITS_OF_SKLEARN = {
    "train": (1297, "1f373dee74334ed1fa42dd2f8d4fe660cdfc10440c92ba5cec6d00db416cc62f"),
    "validation": (200, "1af3521d5b96222a5c548f63857776eabae4cb492ab21914eb81eb473e46d2d2"),
    "test": (300, "6d127dbc6685152055f76551c37c8ed3f1dc4f3ee73166f5f1bd8d6bc4349404"),
}


@pytest.mark.parametrize("split", DIGITS_OF_SKLEARN)
def test_digits_are_the_same_everywhere(split):
    images, labels = read_digits(split)
    assert images.dtype == labels.dtype == np.uint8
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert (len(images), digest) == DIGITS_OF_SKLEARN[split]
    assert images.shape[1:] == (28, 28)


def test_scikit_learn_has_other_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist_digits, "DIGITS_SHA256", "0" * 64)
    assert "digits.csv.gz: sha256" in problems(find_dataset, tmp_path, "digits")[0]


@pytest.mark.usefixtures("offline")
def test_half_of_mnist_is_an_error_under_auto_too(root):
    (root / "MNIST" / "raw" / TRAIN_LABELS).unlink()
    found = problem(find_dataset, root, "auto")
    assert f"MNIST/raw lacks {TRAIN_LABELS}, unpacked or as .gz" in found
    assert problem(find_dataset, root, "mnist").endswith(", or choose --dataset digits.")
