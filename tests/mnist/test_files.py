"""The images, found, read and checked: MNIST's files, most made up by the tests, and digits."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from mnist.files import (
    MNIST_SHA256,
    Split,
    find_dataset,
    read_digits,
    read_mnist,
    read_splits,
)
from mnist.idx_files import read_file
from tests.mnist.made_up import (
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    content_of,
    files_below,
    link_files,
    made_up,
)
from tests.refusals import problem
from tests.scripts import output_of

READ_IN_HALF_A_GIGABYTE = """
import resource, sys
from pathlib import Path
from mnist.idx_files import UserError, read_file

resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
try:
    read_file(Path(sys.argv[1]), sys.argv[2])
except UserError as error:
    print(error)
"""


def test_too_little_memory_is_no_damage(tmp_path: Path) -> None:
    file = tmp_path / "MNIST" / "raw" / TEST_IMAGES
    file.parent.mkdir(parents=True)
    with file.open("wb") as large:
        large.truncate(2**30)
    told = output_of(READ_IN_HALF_A_GIGABYTE, tmp_path, TEST_IMAGES)
    assert told.startswith(f"{file}: cannot be read (MemoryError). Free some memory")
    assert "Copy" not in told


def test_known_checksums() -> None:
    """Those of the four files that LeCun, Cortes and Burges published, together."""
    together = hashlib.sha256(repr(sorted(MNIST_SHA256.items())).encode()).hexdigest()
    assert together == "b18f26934f2fc9d40a518d69373d8edabd4098da817943a60c8b5609867b2700"


def test_the_split_is_the_published_one(made_up_mnist: Path) -> None:
    train, validation, test = read_splits(made_up_mnist, "mnist", lambda *arrays: arrays[1])
    assert (len(train), len(validation)) == (55_000, 5_000)
    assert train.indices[:5] == [37542, 43087, 2992, 25810, 39634]
    assert validation.indices[:5] == [55299, 34709, 13174, 51723, 17718]
    assert sorted(train.indices + validation.indices) == [*range(60_000)]
    assert train.dataset is validation.dataset
    assert len(test) == 10_000


@pytest.mark.parametrize("layout", ["MNIST/raw", "MNISTCustom/raw"])
def test_layouts(
    made_up_mnist: Path, packed: dict[str, bytes], tmp_path: Path, layout: str
) -> None:
    """Unpacked, or packed in torchvision's folder of a subclass; a folder is only read."""
    link_files(made_up_mnist, tmp_path / layout, (TEST_IMAGES, TEST_LABELS))
    for name in (TRAIN_IMAGES, TRAIN_LABELS):
        (tmp_path / layout / f"{name}.gz").write_bytes(packed[f"{name}.gz"])
    before = files_below(tmp_path)
    assert find_dataset(tmp_path, "auto") == "mnist"
    for train, names in ((True, (TRAIN_IMAGES, TRAIN_LABELS)), (False, (TEST_IMAGES, TEST_LABELS))):
        for found, name in zip(read_mnist(tmp_path, train), names, strict=True):
            np.testing.assert_array_equal(found, made_up(name))
    assert files_below(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"\1" * 10_008, "sha256 "),
        (gzip.compress(content_of(TEST_LABELS))[:-9], "cannot be read (EOFError: "),
        (b"", "sha256 "),
    ],
    ids=["other content", "cut", "empty"],
)
def test_damaged_files(root: Path, content: bytes, fault: str) -> None:
    """Also noticed by the ranks, if a file is replaced after the check."""
    path = root / "MNIST" / "raw" / TEST_LABELS
    path.unlink()
    path = path.with_name(f"{TEST_LABELS}.gz") if content[:1] == b"\x1f" else path
    path.write_bytes(content)
    told = problem(find_dataset, root, "auto")
    assert told.startswith(f"{path}: {fault}")
    assert problem(read_mnist, root, False) == told


@pytest.mark.usefixtures("offline")
def test_half_of_mnist_is_an_error_under_auto_too(root: Path) -> None:
    (root / "MNIST" / "raw" / TRAIN_LABELS).unlink()
    assert problem(find_dataset, root, "auto").startswith(
        f"{root}/MNIST/raw lacks {TRAIN_LABELS}, unpacked or as .gz, and they cannot be downloaded "
        "(OSError: no network). "
    )
    assert "cannot be read (No such file" in problem(read_file, root, TRAIN_LABELS)


DIGITS_OF_SKLEARN: dict[Split, tuple[int, str]] = {
    "train": (1297, "1f373dee74334ed1fa42dd2f8d4fe660cdfc10440c92ba5cec6d00db416cc62f"),
    "validation": (200, "1af3521d5b96222a5c548f63857776eabae4cb492ab21914eb81eb473e46d2d2"),
    "test": (300, "6d127dbc6685152055f76551c37c8ed3f1dc4f3ee73166f5f1bd8d6bc4349404"),
}


@pytest.mark.parametrize("split", DIGITS_OF_SKLEARN)
def test_digits_are_the_same_everywhere(split: Split) -> None:
    images, labels = read_digits(split)
    assert images.dtype == labels.dtype == np.uint8
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert (len(images), digest) == DIGITS_OF_SKLEARN[split]
    assert images.shape[1:] == (28, 28)
