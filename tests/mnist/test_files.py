"""The real MNIST files, whole and spoilt; a local server as mirror; scikit-learn's digits."""

import gzip
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from megakit.errors import UserError
from mnist import files as mnist_files
from mnist.files import MNIST_SHA256, Split, check_mnist, find_dataset, read_digits, read_mnist

REPOSITORY = Path(mnist_files.__file__).parents[1]
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = MNIST_SHA256


@pytest.fixture
def root(mnist_dir, tmp_path):
    """A root whose files lead to the real ones, for a test to replace some."""
    return link_files(mnist_dir, tmp_path / "data" / "MNIST" / "raw")


@pytest.fixture(scope="session")
def packed(mnist_dir):
    """The four files as a mirror sends them."""
    return {
        f"{name}.gz": gzip.compress((mnist_dir / "MNIST" / "raw" / name).read_bytes(), 1)
        for name in MNIST_SHA256
    }


@pytest.fixture
def lines():
    return []


def link_files(mnist_dir, folder, names=tuple(MNIST_SHA256)):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).symlink_to(mnist_dir / "MNIST" / "raw" / name)
    return folder.parents[1]


def replace(path, content):
    path.unlink()
    path.write_bytes(content)


def problems(function, *args, **options):
    with pytest.raises(UserError) as error:
        function(*args, **options)
    return error.value.problems


def files_below(folder):
    return sorted(path.name for path in folder.rglob("*") if not path.is_dir())


class TestReading:
    @pytest.mark.parametrize(("train", "count"), [(True, 60_000), (False, 10_000)])
    def test_known_values(self, mnist_dir, train, count):
        images, labels = read_mnist(mnist_dir, train)
        assert images.dtype == labels.dtype == np.uint8
        assert images.shape == (count, 28, 28)
        assert labels.shape == (count,)
        assert labels[:5].tolist() == ([5, 0, 4, 1, 9] if train else [7, 2, 1, 0, 4])
        assert round(images.mean() / 255, 4) == (0.1307 if train else 0.1325)

    def test_images_cannot_be_written_and_labels_can(self, mnist_dir):
        images, labels = read_mnist(mnist_dir, train=False)
        with pytest.raises(ValueError, match="read-only"):
            images[0, 0, 0] = 1
        labels[0] = 1

    @pytest.mark.parametrize("layout", ["MNIST/raw", "MNISTCustom/raw"])
    @pytest.mark.parametrize("is_packed", [False, True])
    def test_layouts(self, mnist_dir, packed, tmp_path, layout, is_packed):
        if is_packed:
            (tmp_path / layout).mkdir(parents=True)
            for name, content in packed.items():
                (tmp_path / layout / name).write_bytes(content)
        else:
            link_files(mnist_dir, tmp_path / layout)
        before = files_below(tmp_path)
        check_mnist(tmp_path)
        for train in (True, False):
            for found, real in zip(
                read_mnist(tmp_path, train), read_mnist(mnist_dir, train), strict=True
            ):
                np.testing.assert_array_equal(found, real)
        assert files_below(tmp_path) == before, "a folder that holds the files is only read"

    def test_the_folder_with_most_files_counts(self, mnist_dir, tmp_path):
        link_files(mnist_dir, tmp_path / "MNIST" / "raw", [TEST_LABELS])
        link_files(mnist_dir, tmp_path / "MNISTCustom" / "raw")
        check_mnist(tmp_path)

    def test_names_what_is_missing_or_has_another_size(self, root, mnist_dir):
        folder = root / "MNIST" / "raw"
        (folder / TEST_LABELS).unlink()
        replace(folder / TEST_IMAGES, b"")
        assert f"{folder / TEST_LABELS}: missing" in problems(read_mnist, root, False)[0]
        (folder / TEST_LABELS).symlink_to(mnist_dir / "MNIST" / "raw" / TEST_LABELS)
        assert "0 bytes, expected 7,840,016" in problems(read_mnist, root, False)[0]
        read_mnist(root, train=True)


class TestChecking:
    def test_names_every_bad_file_and_what_is_wrong_with_it(self, root):
        folder = root / "MNIST" / "raw"
        altered = bytearray((folder / TRAIN_LABELS).read_bytes())
        altered[12_345] ^= 1
        replace(folder / TRAIN_LABELS, altered)
        replace(folder / TEST_IMAGES, (folder / TEST_IMAGES).read_bytes()[:-1])
        (folder / TEST_LABELS).unlink()

        found = problems(check_mnist, root)
        assert len(found) == 3
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

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda content: content[:-9], "ends before the end"),
            (lambda content: content[:200] + b"\0" * 9 + content[209:], "rror"),
            (lambda content: b"<html>", "incorrect header"),
            (lambda content: gzip.compress(b"other"), "5 bytes, expected 10,008"),
        ],
    )
    def test_spoilt_gz(self, root, packed, spoil, message):
        (root / "MNIST" / "raw" / TEST_LABELS).unlink()
        path = root / "MNIST" / "raw" / f"{TEST_LABELS}.gz"
        path.write_bytes(packed[path.name])
        check_mnist(root)
        path.write_bytes(spoil(packed[path.name]))
        (problem,) = problems(check_mnist, root)
        assert problem.startswith(f"{path}: ")
        assert message in problem

    def test_a_folder_in_the_place_of_a_file(self, root):
        path = root / "MNIST" / "raw" / TRAIN_LABELS
        path.unlink()
        path.mkdir()
        assert problems(check_mnist, root)[0].startswith(f"{path}: cannot be read (Is a directory)")

    def test_a_file_in_the_place_of_a_folder(self, tmp_path):
        (tmp_path / "data").write_text("")
        for dataset in ("auto", "mnist"):
            (problem,) = problems(find_dataset, tmp_path / "data", dataset)
            assert "data/MNIST/raw: cannot be read (Not a directory)" in problem
            assert "--data-dir" in problem
        assert find_dataset(tmp_path / "data", "digits") == "digits"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
    def test_a_folder_that_may_not_be_read(self, root):
        (root / "MNIST").chmod(0)
        try:
            assert "cannot be read (Permission denied)" in problems(find_dataset, root, "auto")[0]
        finally:
            (root / "MNIST").chmod(0o755)


class Mirror(ThreadingHTTPServer):
    """Serves `files` by path; `answer` may do something else for a path, returning True."""

    daemon_threads = True

    def __init__(self, files):
        self.files, self.requests = files, []
        self.answer = lambda handler, name, content: False
        super().__init__(("127.0.0.1", 0), MirrorHandler)
        self.url = f"http://127.0.0.1:{self.server_port}/"


class MirrorHandler(BaseHTTPRequestHandler):
    server: "Mirror"

    def do_GET(self):
        name = self.path.lstrip("/")
        content = self.server.files.get(name)
        self.server.requests.append(name)
        if self.server.answer(self, name, content):
            return
        if content is None:
            self.send_error(404)
            return
        self.send(content)

    def send(self, content, length=None):
        self.send_response(200)
        self.send_header("Content-Length", str(length or len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def mirror(packed, monkeypatch):
    """A server with all files, the only one that is asked."""
    with Mirror(packed) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(mnist_files, "MIRRORS", (server.url,))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def offline(monkeypatch):
    """No mirror answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(mnist_files, "MIRRORS", (f"http://127.0.0.1:{free.getsockname()[1]}/",))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield


class TestDownloading:
    @pytest.mark.parametrize("dataset", ["auto", "mnist"])
    def test_into_a_new_folder(self, mirror, tmp_path, lines, dataset):
        root = tmp_path / "new" / "data"
        assert find_dataset(root, dataset, report=lines.append) == "mnist"
        assert lines == [f"Downloading {mirror.url}{name}.gz" for name in MNIST_SHA256]
        assert files_below(tmp_path) == sorted(MNIST_SHA256)
        check_mnist(root)
        assert find_dataset(root, dataset, report=lines.append) == "mnist"
        assert len(lines) == len(mirror.requests) == 4, "nothing is downloaded twice"

    def test_others_may_read_what_was_downloaded(self, mirror, tmp_path, lines):
        find_dataset(tmp_path, "mnist", report=lines.append)
        (tmp_path / "plain").write_text("")
        path = tmp_path / "MNIST" / "raw" / TEST_LABELS
        assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode

    def test_only_what_is_missing(self, mirror, mnist_dir, tmp_path, lines):
        link_files(mnist_dir, tmp_path / "MNISTCustom" / "raw", [TRAIN_IMAGES, TEST_IMAGES])
        assert find_dataset(tmp_path, "auto", report=lines.append) == "mnist"
        assert mirror.requests == [f"{TRAIN_LABELS}.gz", f"{TEST_LABELS}.gz"]
        assert files_below(tmp_path / "MNISTCustom") == sorted(MNIST_SHA256)

    def test_goes_on_at_the_next_mirror(self, mirror, tmp_path, lines, monkeypatch, packed):
        mirror.files = {f"{TRAIN_IMAGES}.gz": packed[f"{TRAIN_IMAGES}.gz"]}
        with Mirror(packed) as second:
            thread = threading.Thread(target=second.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            monkeypatch.setattr(mnist_files, "MIRRORS", (mirror.url, second.url))
            assert find_dataset(tmp_path, "mnist", report=lines.append) == "mnist"
            second.shutdown()
            thread.join()
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
                lambda content: (gzip.compress(b"other"), None),
                "sent 5 bytes that are not t10k-images-idx3-ubyte",
                id="other content",
            ),
        ],
    )
    def test_writes_nothing_unless_all_is_right(self, mirror, tmp_path, lines, answer, reason):
        def spoil_third_file(handler, name, content):
            if name == f"{TEST_IMAGES}.gz":
                handler.send(*answer(content))
                return True
            return False

        mirror.answer = spoil_third_file
        assert find_dataset(tmp_path / "data", "auto", report=lines.append) == "digits"
        assert reason in lines[-1]
        assert "127.0.0.1: " in lines[-1]
        assert reason in problems(find_dataset, tmp_path / "data", "mnist", report=lines.append)[0]
        assert list(tmp_path.iterdir()) == []

    def test_no_partial_file_when_the_disk_is_full(self, mirror, tmp_path, lines, monkeypatch):
        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        (problem,) = problems(find_dataset, tmp_path, "mnist", report=lines.append)
        assert "MNIST/raw cannot be written: No space left on device" in problem
        assert files_below(tmp_path) == []

    def test_two_jobs_at_once(self, mirror, tmp_path, lines):
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

    def test_a_folder_that_cannot_be_made(self, mirror, lines):
        root = Path("/proc/nowhere")  # not even root can make it
        assert find_dataset(root, "auto", report=lines.append) == "digits"
        assert "cannot be written" in lines[-1]
        assert "/proc" in problems(find_dataset, root, "mnist", report=lines.append)[0]

    @pytest.mark.parametrize("where", ["before the answer", "in the middle", "drop by drop"])
    def test_a_mirror_that_hangs(self, mirror, tmp_path, lines, monkeypatch, where):
        done = threading.Event()

        def hang(handler, name, content):
            if where == "before the answer":
                done.wait()
            elif where == "in the middle":
                handler.send(content[:1000], len(content))
                done.wait()
            else:
                handler.send(content[:1000], len(content))
                position = 1000
                while position < 1600 and not done.wait(0.5):  # half a minute
                    handler.wfile.write(content[position : position + 10])
                    position += 10
            return True

        mirror.answer = hang
        monkeypatch.setattr(mnist_files, "CONNECT_SECONDS", 0.3)
        monkeypatch.setattr(mnist_files, "DOWNLOAD_SECONDS", 0.6)
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

    def test_looking_up_the_host_may_not_hang_either(self, tmp_path, lines, monkeypatch):
        done = threading.Event()

        def look_up(*args, **options):
            done.wait(60)
            raise socket.gaierror(-3, "Temporary failure in name resolution")

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(mnist_files, "CONNECT_SECONDS", 0.2)
        start = time.monotonic()
        assert find_dataset(tmp_path, "auto", report=lines.append) == "digits"
        seconds = time.monotonic() - start
        done.set()
        assert seconds < 20
        assert lines[0].count("no response within 0.2 s") == len(mnist_files.MIRRORS)


class TestChoosing:
    def test_mnist_that_is_there(self, mnist_dir, lines, offline):
        assert find_dataset(mnist_dir, "auto", report=lines.append) == "mnist"
        assert find_dataset(mnist_dir, "mnist", report=lines.append) == "mnist"
        assert lines == []

    def test_digits_where_there_is_nothing_else(self, tmp_path, lines, offline):
        assert find_dataset(tmp_path, "auto", report=lines.append) == "digits"
        assert lines == [
            f"MNIST is not in {tmp_path}/MNIST/raw and cannot be downloaded (127.0.0.1: Connection "
            "refused): using digits, the 1,797 scans that come with scikit-learn."
        ]
        assert list(tmp_path.iterdir()) == []

    def test_says_so_on_standard_error(self, tmp_path, offline, capsys):
        find_dataset(tmp_path, "auto")
        output = capsys.readouterr()
        assert output.out == ""
        assert "using digits" in output.err

    def test_digits_that_were_asked_for(self, mnist_dir, lines, offline):
        assert find_dataset(mnist_dir, "digits", previous="mnist", report=lines.append) == "digits"
        assert lines == []

    def test_what_it_goes_on_from(self, mnist_dir, tmp_path, lines, offline):
        assert find_dataset(mnist_dir, "auto", previous="digits", report=lines.append) == "digits"
        assert find_dataset(mnist_dir, "auto", previous="mnist", report=lines.append) == "mnist"
        assert find_dataset(mnist_dir, "mnist", previous="digits", report=lines.append) == "mnist"
        (problem,) = problems(find_dataset, tmp_path, "auto", "mnist", lines.append)
        assert problem.startswith("--dataset auto (mnist, as in the earlier run): ")
        assert lines == []

    def test_no_mnist_is_an_error_if_it_was_asked_for(self, tmp_path, lines, offline):
        (problem,) = problems(find_dataset, tmp_path, "mnist", report=lines.append)
        assert problem == (
            f"--dataset mnist: {tmp_path}/MNIST/raw lacks {', '.join(MNIST_SHA256)}, unpacked or "
            "as .gz, and they cannot be downloaded (127.0.0.1: Connection refused). Copy the files "
            "there, choose another --data-dir, or choose --dataset digits."
        )
        assert list(tmp_path.iterdir()) == []

    def test_half_of_mnist_is_an_error_under_auto_too(self, root, lines, offline):
        (root / "MNIST" / "raw" / TRAIN_LABELS).unlink()
        (problem,) = problems(find_dataset, root, "auto", report=lines.append)
        assert f"MNIST/raw lacks {TRAIN_LABELS}, unpacked or as .gz" in problem
        assert lines == []


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
        parts = {split: mnist_files._digits_split(digits.target, split) for split in self.SIZES}
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
        enlarged = mnist_files._enlarge(pixels)
        assert np.abs(enlarged - expected.numpy()).max() <= 0.5 + 1e-9

    def test_enlarging_keeps_the_whole_range(self):
        assert (mnist_files._enlarge(np.full((1, 8, 8), 16)) == 255).all()
        assert (mnist_files._enlarge(np.zeros((1, 8, 8), int)) == 0).all()

    def test_scikit_learn_is_absent(self, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        for function, args in ((find_dataset, (tmp_path, "digits")), (read_digits, ("test",))):
            (problem,) = problems(function, *args)
            assert "not installed" in problem
            assert "--dataset mnist" in problem

    def test_scikit_learn_has_other_digits(self, tmp_path, monkeypatch):
        monkeypatch.setattr(mnist_files, "DIGITS_SHA256", "0" * 64)
        assert "digits.csv.gz: sha256" in problems(find_dataset, tmp_path, "digits")[0]


def run_python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.split()


def test_importing_is_light():
    """`--help` waits for it."""
    heavy = {"numpy", "torch", "sklearn", "PIL", "urllib.request", "concurrent.futures", "ssl"}
    loaded = run_python("import sys, mnist.files; print(*sys.modules)")
    assert "mnist.files" in loaded
    assert not heavy & set(loaded)


def test_finding_is_light(mnist_dir):
    """Every start does it, in the process that starts the ranks."""
    code = f"""
import sys, pathlib
from mnist import files as mnist_files
mnist_files.find_dataset(pathlib.Path({str(mnist_dir)!r}), "mnist")
mnist_files.find_dataset(pathlib.Path("none"), "digits")
print(*sys.modules)"""
    assert not {"numpy", "torch", "sklearn", "urllib.request"} & set(run_python(code))
