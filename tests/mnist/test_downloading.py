"""MNIST downloaded from servers of the tests' own, which may hang, lack files or lie."""

import gzip
import shutil
import socket
import time

import pytest

from mnist import downloading
from mnist.files import MNIST_SHA256, check_mnist, find_dataset
from tests.mnist.conftest import serving
from tests.mnist.made_up import TEST_IMAGES, TRAIN_IMAGES, files_below, link_files
from tests.refusals import problem


def test_into_a_new_folder(mirror, tmp_path, lines):
    root = tmp_path / "new" / "data"
    assert find_dataset(root, "auto", report=lines.append) == "mnist"
    assert lines == [f"Downloading {downloading.MIRRORS[0]}{name}.gz" for name in MNIST_SHA256]
    assert files_below(tmp_path) == sorted(MNIST_SHA256)
    check_mnist(root)
    assert find_dataset(root, "auto", report=lines.append) == "mnist"
    assert len(lines) == 4, "nothing is downloaded twice"


def test_only_what_is_missing_and_on_at_the_next_mirror(
    mirror, made_up_mnist, tmp_path, lines, monkeypatch
):
    root = link_files(made_up_mnist, tmp_path / "MNISTCustom" / "raw", (TRAIN_IMAGES, TEST_IMAGES))
    (tmp_path / "half").mkdir()
    shutil.copy(mirror / "train-labels-idx1-ubyte.gz", tmp_path / "half")
    with serving(tmp_path / "half") as half:
        monkeypatch.setattr(downloading, "MIRRORS", (half, *downloading.MIRRORS))
        assert find_dataset(root, "mnist", report=lines.append) == "mnist"
    assert [line.rpartition("/")[2] for line in lines] == [
        *("train-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
    ]
    check_mnist(root)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(b"<html>Log in", "header"), (gzip.compress(bytes(7_840_016)), "sent 7,840,016 bytes that")],
    ids=["captive portal", "other content of the same size"],
)
def test_writes_nothing_unless_all_is_right(mirror, tmp_path, lines, answer, reason):
    (mirror / f"{TEST_IMAGES}.gz").write_bytes(answer)
    assert find_dataset(tmp_path / "data", "auto", report=lines.append) == "digits"
    assert reason in lines[-1]
    assert reason in problem(find_dataset, tmp_path / "data", "mnist", report=lines.append)
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_that_hangs(tmp_path, lines, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # accepts, and never answers
        address = f"http://127.0.0.1:{hanging.getsockname()[1]}/"
        monkeypatch.setattr(downloading, "MIRRORS", (address,))
        monkeypatch.setattr(downloading, "CONNECT_SECONDS", 0.3)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        start = time.monotonic()
        assert find_dataset(tmp_path, "auto", report=lines.append) == "digits"
    assert time.monotonic() - start < 20
    assert "0.3 s" in lines[-1] or "timed out" in lines[-1]  # ours or urllib's, whichever is first
