"""MNIST downloaded from servers of the tests' own, which may hang, break off or lie."""

import gzip
import threading
import time

import pytest

from mnist import downloading
from mnist.files import MNIST_SHA256, check_mnist, find_dataset
from tests.hostile import problem
from tests.mnist.conftest import serving
from tests.mnist.made_up import (
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    files_below,
    link_files,
)


def test_into_a_new_folder(mirror, tmp_path, lines):
    root = tmp_path / "new" / "data"
    assert find_dataset(root, "auto", report=lines.append) == "mnist"
    assert lines == [f"Downloading {mirror.url}{name}.gz" for name in MNIST_SHA256]
    assert files_below(tmp_path) == sorted(MNIST_SHA256)
    check_mnist(root)
    assert find_dataset(root, "auto", report=lines.append) == "mnist"
    assert len(lines) == len(mirror.requests) == 4, "nothing is downloaded twice"


def test_only_what_is_missing(mirror, made_up_mnist, tmp_path, lines):
    link_files(made_up_mnist, tmp_path / "MNISTCustom" / "raw", (TRAIN_IMAGES, TEST_IMAGES))
    assert find_dataset(tmp_path, "auto", report=lines.append) == "mnist"
    assert mirror.requests == [f"{TRAIN_LABELS}.gz", f"{TEST_LABELS}.gz"]
    assert files_below(tmp_path / "MNISTCustom") == sorted(MNIST_SHA256)


def test_goes_on_at_the_next_mirror(mirror, tmp_path, lines, monkeypatch, packed):
    mirror.files = {f"{TRAIN_IMAGES}.gz": packed[f"{TRAIN_IMAGES}.gz"]}
    with serving(packed) as second:
        monkeypatch.setattr(downloading, "MIRRORS", (mirror.url, second.url))
        assert find_dataset(tmp_path, "mnist", report=lines.append) == "mnist"
    assert len(second.requests) == 3
    check_mnist(tmp_path)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"<html>Log in", "header"),
        (
            gzip.compress(bytes(7_840_016)),
            "sent 7,840,016 bytes that are not t10k-images-idx3-ubyte",
        ),
    ],
    ids=["captive portal", "other content of the same size"],
)
def test_writes_nothing_unless_all_is_right(mirror, tmp_path, lines, answer, reason):
    def spoil_third_file(handler, name, content):
        if name == f"{TEST_IMAGES}.gz":
            handler.send(answer)
            return True
        return False

    mirror.answer = spoil_third_file
    assert find_dataset(tmp_path / "data", "auto", report=lines.append) == "digits"
    assert reason in lines[-1]
    assert reason in problem(find_dataset, tmp_path / "data", "mnist", report=lines.append)
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_that_hangs(mirror, tmp_path, lines, monkeypatch):
    done = threading.Event()
    mirror.answer = lambda handler, name, content: done.wait(60)
    monkeypatch.setattr(downloading, "CONNECT_SECONDS", 0.3)
    start = time.monotonic()
    try:
        assert find_dataset(tmp_path, "auto", report=lines.append) == "digits"
    finally:
        seconds = time.monotonic() - start
        done.set()
    assert seconds < 20
    assert "timed out" in lines[-1]
