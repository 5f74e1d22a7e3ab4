"""MNIST downloaded from servers of the tests' own, which may hang, break off or lie."""

import gzip
import socket
import threading
import time
from pathlib import Path

import pytest

from mnist import downloading
from mnist.files import MNIST_SHA256, check_mnist, find_dataset
from tests.mnist.conftest import serving
from tests.mnist.made_up import (
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    files_below,
    link_files,
    pack,
)
from tests.refusals import problem


def test_into_a_new_folder(mirror, tmp_path, lines):
    root = tmp_path / "new" / "data"
    assert find_dataset(root, "auto", report=lines.append) == "mnist"
    assert lines == [f"Downloading {mirror.url}{name}.gz" for name in MNIST_SHA256]
    assert files_below(tmp_path) == sorted(MNIST_SHA256)
    check_mnist(root)
    assert find_dataset(root, "auto", report=lines.append) == "mnist"
    assert len(lines) == len(mirror.requests) == 4, "nothing is downloaded twice"


def test_by_a_data_module_without_a_script(mirror, tmp_path, megatron):
    from model_components import MNISTDataModule

    data = MNISTDataModule(data_dir=tmp_path)
    data.setup("fit")
    assert len(mirror.requests) == 4
    assert [*map(len, (data.mnist_val, data.mnist_test))] == [5_000, 10_000]


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
        pytest.param(
            lambda content: (content[: len(content) // 2], len(content)),
            "bytes that are not",
            id="interrupted",
        ),
        pytest.param(lambda content: (b"<html>Log in", None), "header", id="captive portal"),
        pytest.param(
            lambda content: (pack(bytes(len(gzip.decompress(content)))), None),
            "sent 7,840,016 bytes that are not t10k-images-idx3-ubyte",
            id="other content of the same size",
        ),
    ],
)
def test_writes_nothing_unless_all_is_right(mirror, tmp_path, lines, answer, reason):
    def spoil_third_file(handler, name, content):
        if name == f"{TEST_IMAGES}.gz":
            handler.send(*answer(content))
            return True
        return False

    mirror.answer = spoil_third_file
    assert find_dataset(tmp_path / "data", "auto", report=lines.append) == "digits"
    assert reason in lines[-1]
    assert "127.0.0.1: " in lines[-1]
    assert reason in problem(find_dataset, tmp_path / "data", "mnist", report=lines.append)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(mirror, tmp_path, lines, monkeypatch):
    root = Path("/proc/nowhere")  # not even root can make it
    assert find_dataset(root, "auto", report=lines.append) == "digits"
    assert "cannot be written" in lines[-1]

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    told = problem(find_dataset, tmp_path, "mnist", report=lines.append)
    assert "MNIST/raw cannot be written: No space left on device" in told
    assert files_below(tmp_path) == []


def test_two_jobs_at_once(mirror, tmp_path, lines):
    jobs = [
        threading.Thread(target=find_dataset, args=(tmp_path, "mnist", None, lines.append))
        for _ in range(2)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    check_mnist(tmp_path)
    assert files_below(tmp_path) == sorted(MNIST_SHA256)


@pytest.mark.parametrize("where", ["host name", "before the answer", "drop by drop"])
def test_a_mirror_that_hangs(mirror, tmp_path, lines, monkeypatch, where):
    done = threading.Event()

    def hang(handler, name, content):
        if where == "before the answer":
            done.wait()
        else:
            handler.send(content[:1000], len(content))
            position = 1000
            while position < 1600 and not done.wait(0.5):  # half a minute
                handler.wfile.write(content[position : position + 10])
                position += 10
        return True

    def look_up(*args, **options):
        done.wait(60)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    mirror.answer = hang
    if where == "host name":
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(downloading, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(downloading, "DOWNLOAD_SECONDS", 0.6)
    start = time.monotonic()
    try:
        assert find_dataset(tmp_path, "auto", report=lines.append) == "digits"
    finally:
        seconds = time.monotonic() - start
        done.set()
    assert 0.2 < seconds < 20
    assert any(
        word in lines[-1] for word in ("timed out", "no response within", "not complete after")
    )
