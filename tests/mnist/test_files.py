"""MNIST's files, whole and spoilt, found, read and checked; most are made up by the tests."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnist.files import MNIST_SHA256, check_mnist, find_dataset, read_mnist, read_splits
from tests.mnist.made_up import (
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    content_of,
    files_below,
    link_files,
    made_up,
    pack,
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
        np.testing.assert_array_equal(train.dataset, made_up(TRAIN_LABELS))
        np.testing.assert_array_equal(test, made_up(TEST_LABELS))

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
    def test_names_every_bad_file_and_what_is_wrong_with_it(self, root):
        folder = root / "MNIST" / "raw"
        altered = bytearray((folder / TRAIN_LABELS).read_bytes())
        altered[12_345] ^= 1
        replace(folder / TRAIN_LABELS, bytes(altered))
        replace(folder / TEST_IMAGES, (folder / TEST_IMAGES).read_bytes()[:-1])
        (folder / TEST_LABELS).unlink()

        found = problems(check_mnist, root)
        labels, images, missing = found
        assert labels.startswith(f"{folder / TRAIN_LABELS}: sha256 ")
        assert hashlib.sha256(altered).hexdigest() in labels
        assert MNIST_SHA256[TRAIN_LABELS] in labels
        assert images.startswith(
            f"{folder / TEST_IMAGES}: 7,840,015 bytes, expected 7,840,016. The file is damaged"
        )
        assert "Copy it again, or delete it" in images
        assert missing.startswith(f"{folder / TEST_LABELS}: missing")
        assert problems(find_dataset, root, "auto") == found, "never digits in silence"

    def test_what_is_used_is_what_was_checked(self, root):
        """A file that is replaced after the check is noticed by the ranks that read it."""
        path = root / "MNIST" / "raw" / TEST_LABELS
        assert find_dataset(root, "mnist") == "mnist"
        replace(path, b"\1" * 10_008)
        assert f"{path}: sha256 " in problem(read_mnist, root, False)

    @pytest.mark.parametrize(
        ("content", "fault"),
        [
            (pack(content_of(TEST_LABELS))[:-9], "ends before the end"),
            (b"<html>", "incorrect header"),
            (pack(b"other"), "5 bytes, expected 10,008"),
        ],
        ids=["cut", "no gzip", "other"],
    )
    def test_packed_files(self, root, content, fault):
        path = root / "MNIST" / "raw" / TEST_LABELS
        path.unlink()
        path.with_name(f"{TEST_LABELS}.gz").write_bytes(content)
        assert fault in problem(find_dataset, root, "mnist")

    def test_a_root_that_is_no_folder(self, tmp_path):
        root = tmp_path / "data"
        root.write_text("")
        said = problem(find_dataset, root, "auto")
        assert said.startswith(f"{root / 'MNIST' / 'raw'}: cannot be read (")
        assert "--data-dir" in said


@pytest.mark.usefixtures("offline")
class TestChoosing:
    def test_what_it_goes_on_from(self, made_up_mnist, tmp_path, lines):
        def choose(dataset: Any, previous: Any = None, root: Path = made_up_mnist) -> str:
            return find_dataset(root, dataset, previous, lines.append)

        assert [choose("auto"), choose("mnist"), choose("mnist", "digits")] == ["mnist"] * 3
        assert [choose("digits", "mnist"), choose("auto", "digits")] == ["digits"] * 2
        assert choose("auto", "mnist") == "mnist"
        told = problem(choose, "auto", "mnist", tmp_path)
        assert told.startswith("--dataset auto (mnist, as in the earlier run): ")
        assert "digits" not in told, "another dataset would be refused"
        assert lines == []

    def test_digits_where_there_is_nothing_else(self, tmp_path, lines):
        assert find_dataset(tmp_path, "auto", report=lines.append) == "digits"
        assert lines == [
            f"MNIST is not in {tmp_path}/MNIST/raw and cannot be downloaded (127.0.0.1: Connection "
            "refused): using digits, the 1,797 scans that come with scikit-learn. --data-dir names "
            "the folder that contains MNIST/raw."
        ]
        assert problem(find_dataset, tmp_path, "mnist") == (
            f"--dataset mnist: {tmp_path}/MNIST/raw lacks {', '.join(MNIST_SHA256)}, unpacked or "
            "as .gz, and they cannot be downloaded (127.0.0.1: Connection refused). Copy the files "
            "there, choose another --data-dir, or choose --dataset digits."
        )
        assert list(tmp_path.iterdir()) == []

    def test_half_of_mnist_is_an_error_under_auto_too(self, root):
        (root / "MNIST" / "raw" / TRAIN_LABELS).unlink()
        found = problem(find_dataset, root, "auto")
        assert f"MNIST/raw lacks {TRAIN_LABELS}, unpacked or as .gz" in found
