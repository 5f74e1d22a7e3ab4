"""Data and pictures that are hostile: one message each, within bounded memory and at once.

What is measured, or may end in a signal, runs in a process of its own. MNIST's files are made up.
"""

import contextlib
import gzip
import hashlib
import io
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megakit.errors import UserError
from megakit.job.script import Run
from megakit.reporting.console import Console
from mnist import files as mnist_files
from mnist.files import MNIST_SHA256, find_dataset, read_digits, read_mnist
from mnist.own_pictures import read_pictures, to_training_form
from model_finetune import FINETUNE, FinetuneOptions
from model_predict import PREDICT, PredictOptions, predict
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import make_run, prepare_run
from tests.mnist.test_files import Mirror
from tests.scripts import REPOSITORY, run_script

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = MNIST_SHA256
MEGABYTE = 1 << 20


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files in MNIST's format whose content counts as MNIST's."""
    folder = tmp_path / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name in MNIST_SHA256:
        content = made_up(name)
        (folder / name).write_bytes(content)
        monkeypatch.setitem(MNIST_SHA256, name, hashlib.sha256(content).hexdigest())
    return folder


def made_up(name: str) -> bytes:
    count = 60_000 if name.startswith("train") else 10_000
    return bytes(16) + bytes(range(196)) * 4 * count if "images" in name else bytes(8 + count)


def problems(function: Callable[..., object], *arguments: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        function(*arguments)
    for problem in caught.value.problems:
        assert len(problem.splitlines()) == 1
        assert problem.isprintable()
    return caught.value.problems


def problem(function: Callable[..., object], *arguments: object) -> str:
    (only,) = problems(function, *arguments)
    return only


def bomb(size: int) -> bytes:
    """Gzip of so many zeros, some thousandth of their number, made without holding them."""
    packer = zlib.compressobj(1, wbits=31)
    parts = [packer.compress(bytes(MEGABYTE)) for _ in range(size // MEGABYTE)]
    return b"".join([*parts, packer.flush()])


def run_apart(code: str, *arguments: object) -> str:
    """Runs code in a process that ends well within a minute and with 6 GB of addresses."""
    bounded = "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
    done = subprocess.run(
        [sys.executable, "-c", bounded + code, *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr}"
    return done.stdout


def refused_within(megabytes: int, call: str, path: Path) -> str:
    """What a call with a path refuses; it takes no more memory than that beyond its imports."""
    code = f"""
import sys
from pathlib import Path
import numpy, PIL.Image, PIL.ImageOps, PIL.PngImagePlugin, PIL.JpegImagePlugin, PIL.ImageChops
from mnist import files as mnist_files, own_pictures
from megakit.errors import UserError
from megakit.reporting.console import Console
from megakit.job.script import Run

def peak():  # of this program alone, unlike ru_maxrss
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

path, before = Path(sys.argv[1]), peak()
try:
    {call}
except UserError as error:
    print((peak() - before) // 1024)
    print(error)
"""
    taken, said = run_apart(code, path).split("\n", 1)
    assert len(said.splitlines()) == 1
    assert int(taken) <= megabytes, said
    return said


def no_file(path: Path, kind: str) -> None:
    """Puts something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path may have 107 bytes
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
        finally:
            os.chdir(here)


KINDS = ("fifo", "device", "folder", "socket", "loop")


class TestMnist:
    def test_truncated_while_it_is_used(self, raw: Path) -> None:
        code = """
import sys, os, hashlib
from pathlib import Path
from mnist import files as mnist_files
root = Path(sys.argv[1])
for path in (root / "MNIST" / "raw").iterdir():
    mnist_files.MNIST_SHA256[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
images, labels = mnist_files.read_mnist(root, train=False)
os.truncate(root / "MNIST" / "raw" / "t10k-images-idx3-ubyte", 0)
print(int(images.sum()), len(labels))
"""
        expected = 10_000 * 4 * sum(range(196))
        assert run_apart(code, raw.parents[1]).split() == [str(expected), "10000"]

    def test_what_is_used_is_what_was_checked(self, raw: Path) -> None:
        """A file that is replaced after the check is noticed by the ranks that read it."""
        root = raw.parents[1]
        assert find_dataset(root, "mnist") == "mnist"
        (raw / TEST_LABELS).write_bytes(b"\1" * 10_008)
        assert f"{raw / TEST_LABELS}: sha256 " in problem(read_mnist, root, False)
        (raw / TEST_LABELS).unlink()
        assert f"{raw / TEST_LABELS}: missing" in problem(read_mnist, root, False)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_no_file(self, raw: Path, kind: str, suffix: str) -> None:
        (raw / TEST_LABELS).unlink()
        path = raw / f"{TEST_LABELS}{suffix}"
        no_file(path, kind)
        for said in (
            problem(find_dataset, raw.parents[1], "auto"),
            problem(read_mnist, raw.parents[1], False),
        ):
            assert said.startswith(f"{path}: cannot be read (")
            assert "Copy it again" in said

    def test_links_to_files_are_fine(self, raw: Path, tmp_path: Path) -> None:
        (raw / TEST_LABELS).rename(tmp_path / "elsewhere")
        (raw / TEST_LABELS).symlink_to(tmp_path / "elsewhere")
        assert find_dataset(raw.parents[1], "auto") == "mnist"

    @pytest.mark.parametrize("kind", ["file", "fifo", "loop", "loop below"])
    def test_a_root_that_is_no_folder(self, tmp_path: Path, kind: str) -> None:
        root = tmp_path / "data"
        if kind == "file":
            root.write_text("")
        elif kind == "loop below":
            (root / "MNIST").mkdir(parents=True)
            no_file(root / "MNIST" / "raw", "loop")
        else:
            no_file(root, kind)
        for dataset in ("auto", "mnist"):
            said = problem(find_dataset, root, dataset)
            assert said.startswith(f"{root / 'MNIST' / 'raw'}: cannot be read (")
            assert "--data-dir" in said


class TestGzip:
    @pytest.fixture
    def path(self, raw: Path) -> Path:
        (raw / TEST_LABELS).unlink()
        return raw / f"{TEST_LABELS}.gz"

    def test_bombs_are_not_unpacked(self, tmp_path: Path) -> None:
        path = tmp_path / f"{TEST_IMAGES}.gz"
        path.write_bytes(bomb(300 * MEGABYTE))
        said = refused_within(40, f"mnist_files._content({TEST_IMAGES!r}, path)", path)
        assert f"{path}: cannot be read (" in said
        assert "unpacks to more than 7,840,016 bytes" in said

    def test_large_files_are_not_read(self, path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(1 << 34)
        assert "17,179,869,184 bytes; at most" in problem(find_dataset, path.parents[2], "mnist")

    @pytest.mark.parametrize(
        ("spoil", "fault"),
        [
            (lambda packed: packed[:-9], "ends before the end"),
            (lambda packed: packed + b"more", "has further bytes after"),
            (lambda packed: packed + packed, "has further bytes after"),
            (lambda packed: packed[:-8] + bytes(8), "incorrect data check"),
            (lambda packed: b"", "ends before the end"),
        ],
    )
    def test_streams(self, path: Path, spoil: Callable[[bytes], bytes], fault: str) -> None:
        packed = gzip.compress(made_up(TEST_LABELS))
        path.write_bytes(packed)
        assert find_dataset(path.parents[2], "mnist") == "mnist"
        path.write_bytes(spoil(packed))
        assert fault in problem(find_dataset, path.parents[2], "mnist")

    def test_digits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """scikit-learn's folder may be anything, too."""
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


class TestMirrors:
    @pytest.fixture
    def mirror(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
        with Mirror({}) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            monkeypatch.setattr(mnist_files, "MIRRORS", (server.url,))
            monkeypatch.setattr(mnist_files, "DOWNLOAD_SECONDS", 5.0)
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            yield server
            server.shutdown()
            thread.join()

    def test_a_bomb(self, mirror: Mirror, tmp_path: Path) -> None:
        mirror.files = {f"{TRAIN_IMAGES}.gz": bomb(200 * MEGABYTE)}
        said = problem(find_dataset, tmp_path, "mnist", None, print)
        assert f"sent 47,040,017 bytes that are not {TRAIN_IMAGES}" in said

    def test_more_than_a_file(self, raw: Path, mirror: Mirror) -> None:
        """What comes after the end of the file is not waited for."""
        (raw / TEST_LABELS).unlink()
        done = threading.Event()

        def go_on(handler: Any, name: str, content: bytes) -> bool:
            packed = gzip.compress(made_up(TEST_LABELS))
            handler.send(packed + bytes(1 << 18), 1 << 30)
            done.wait(120)
            return True

        mirror.answer = go_on
        began = time.monotonic()
        try:
            assert find_dataset(raw.parents[1], "mnist", None, print) == "mnist"
        finally:
            done.set()
        assert time.monotonic() - began < 60
        assert (raw / TEST_LABELS).read_bytes() == made_up(TEST_LABELS)

    @pytest.mark.parametrize("location", ["http://[", "http://a b/", "file:///etc/passwd", "\xe9:"])
    def test_redirected_to_nonsense(self, mirror: Mirror, tmp_path: Path, location: str) -> None:
        def redirect(handler: Any, name: str, content: bytes) -> bool:
            handler.send_response(302)
            handler.send_header("Location", location)
            handler.end_headers()
            return True

        mirror.answer = redirect
        said = problem(find_dataset, tmp_path, "mnist", None, print)
        assert "cannot be downloaded (127.0.0.1: " in said


def npy(
    header: str, numbers: bytes, version: tuple[int, int] = (1, 0), length: int | None = None
) -> bytes:
    """A file as numpy.save writes it, with any header."""
    size = struct.pack("<H" if version == (1, 0) else "<I", length or len(header))
    return b"\x93NUMPY" + bytes(version) + size + header.encode() + numbers


def described(shape: str, descr: str = "'|u1'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n"


def saved(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


IMAGE = np.tile(np.arange(0, 252, 9, np.uint8), (28, 1))[None]
PLAIN = IMAGE.tobytes()


class TestArrays:
    @pytest.mark.parametrize(
        ("content", "fault"),
        [
            (npy(described("(1000000000000, 28, 28)"), PLAIN), "shape (1000000000000, 28, 28)"),
            (npy(described("(99999, 28, 28)"), PLAIN), "784 bytes of numbers, expected 78,399,216"),
            (npy(described("(99999, 28, 28)", "'<f8'"), PLAIN), "expected 627,193,728"),
            (npy(described("(-1, 28, 28)"), PLAIN), "shape (-1, 28, 28)"),
            (npy(described("(1, 28, 28)"), PLAIN[:-1]), "783 bytes of numbers"),
            (npy(described("(1, 28, 28)"), PLAIN * 2), "1,568 bytes of numbers"),
            (npy(described("(1, 28, 28)", "'|V784'"), PLAIN), "type |V784"),
            (npy(described("(1, 28, 28)", "[('a', '|u1')]"), PLAIN), "type [('a', 'u1')]"),
            (npy(described("(1, 28, 28)", "'|O'"), PLAIN), "type object"),
            (npy(described("(1, 28, 28)", "'no type'"), PLAIN), "cannot be read"),
            *((npy(nested * 9000, PLAIN), "cannot be read") for nested in "[(-{"),
            (npy("[" * 60_000, PLAIN), "cannot be read"),
            (npy(described("(1, 28, 28)") + " " * 20_000, PLAIN), "may not be safe"),
            (npy(described("(1, 28, 28)"), PLAIN, (2, 0), 2**32 - 1), "EOF"),
            (npy(described("(1, 28, 28)"), PLAIN, (3, 0)), "format version 3.0"),
            (npy(described("(1, 28, 28)"), PLAIN, (9, 9)), "cannot be read"),
            (b"", "cannot be read"),
            (b"\x93NUMPY", "cannot be read"),
            (saved(np.array([[{}]])), "shape (1, 1)"),
            (saved(np.full((2, 28, 28), np.inf)), "from inf to inf"),
            (saved(np.array([np.nan] * 784).reshape(1, 28, 28)), "from nan to nan"),
        ],
        ids=range(24),
    )
    def test_headers(self, tmp_path: Path, content: bytes, fault: str) -> None:
        path = tmp_path / "some.npy"
        path.write_bytes(content)
        said = problem(read_pictures, path)
        assert said.startswith(f"--input {path}: cannot be read (")
        assert fault in said
        assert len(said) < 500 + len(str(path))

    @pytest.mark.parametrize(
        ("header", "version", "length"),
        [
            (described("(1000000000000, 28, 28)"), (1, 0), None),
            (described("(3000000, 28, 28)"), (1, 0), None),
            (described("(1, 28, 28)"), (2, 0), 2**32 - 1),
        ],
    )
    def test_no_memory_for_what_is_not_there(
        self, tmp_path: Path, header: str, version: tuple[int, int], length: int | None
    ) -> None:
        path = tmp_path / "some.npy"
        path.write_bytes(npy(header, PLAIN, version, length))
        assert "cannot be read" in refused_within(10, "own_pictures.read_pictures(path)", path)

    @pytest.mark.parametrize(
        "array",
        [
            np.asfortranarray(np.concatenate([IMAGE, IMAGE.swapaxes(1, 2)])),
            *(np.repeat(IMAGE, 2, 0).astype(kind) / 255 for kind in ("<f4", "<f8")),
            *((IMAGE / 255).astype(kind) for kind in (">f2", "<f2", ">f4", ">f8", np.longdouble)),
        ],
        ids=range(8),
    )
    def test_orders_and_types(self, tmp_path: Path, array: np.ndarray) -> None:
        np.save(tmp_path / "some.npy", array)
        read = read_pictures(tmp_path / "some.npy").images
        expected = array if array.dtype == np.uint8 else np.rint(array.astype(float) * 255)
        np.testing.assert_array_equal(read, [to_training_form(x) for x in expected.astype("u1")])

    def test_many_floats_take_little_more_than_their_file(self, tmp_path: Path) -> None:
        array = np.zeros((40_000, 28, 28), np.float32)  # 125 MB
        array[:, 5:25, 11:19] = 1
        array[-1, -1, -1] = 2
        np.save(tmp_path / "some.npy", array)
        path = tmp_path / "some.npy"
        said = refused_within(150, "own_pictures.read_pictures(path)", path)
        assert "values from 0 to 2" in said


def chunk(kind: bytes, content: bytes) -> bytes:
    """A part of a PNG file."""
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def png(width: int, height: int, *chunks: bytes, pixels: bytes = b"", color: int = 0) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(pixels, 1)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + body


def stroke(width: int, height: int) -> bytes:
    """Rows of a PNG's pixels, with a bar in the middle."""
    row = bytearray(1 + width)
    row[1 + width // 3 : 1 + width // 2] = b"\xff" * (width // 2 - width // 3)
    return bytes(row) * height


def jpeg(**options: Any) -> bytes:
    file = io.BytesIO()
    picture = np.zeros((60, 60), np.uint8)
    picture[10:50, 25:35] = 255
    Image.fromarray(picture).save(file, "JPEG", **options)
    return file.getvalue()


TEXT_BOMB = b"a\0\0" + zlib.compress(bytes(100 * MEGABYTE), 1)


class TestPictures:
    @pytest.mark.parametrize(
        ("width", "height"), [(20_000_000, 3), (3, 20_001), (10_000, 5_001), (2**31 - 1, 2**31 - 1)]
    )
    def test_too_many_pixels(self, tmp_path: Path, width: int, height: int) -> None:
        path = tmp_path / "huge.png"
        pixels = stroke(width, height) if width * height < 10**8 else b""
        path.write_bytes(png(width, height, pixels=pixels))
        said = refused_within(10, "own_pictures.read_pictures(path)", path)
        assert "50,000,000 pixels at most, and 20,000 a side" in said

    def test_the_largest_picture(self, tmp_path: Path) -> None:
        """Of 50 million pixels, in colour and half transparent: the most memory that one takes."""
        path = tmp_path / "large.png"
        pixels = (b"\0" + bytes([9, 8, 7, 200]) * 10_000) * 5_000
        path.write_bytes(png(10_000, 5_000, pixels=pixels, color=6))
        said = refused_within(1000, "own_pictures.read_pictures(path)", path)
        assert "contains no ink" in said

    @pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
    def test_chunks_that_are_bombs(self, tmp_path: Path, kind: bytes) -> None:
        path = tmp_path / "some.png"
        path.write_bytes(png(28, 28, chunk(kind, TEXT_BOMB)))
        refused_within(20, "own_pictures.read_pictures(path)", path)

    def test_many_small_bombs(self, tmp_path: Path) -> None:
        packed = b"a\0\0" + zlib.compress(bytes(MEGABYTE - 1))
        path = tmp_path / "some.png"
        path.write_bytes(png(28, 28, *[chunk(b"zTXt", packed)] * 300))
        refused_within(150, "own_pictures.read_pictures(path)", path)

    def test_a_large_file(self, tmp_path: Path) -> None:
        with (tmp_path / "a.png").open("wb") as file:
            file.truncate(1 << 34)
        assert "17,179,869,184 bytes; at most 134,217,728" in problem(read_pictures, tmp_path)

    def test_of_an_animation_the_first_frame(self, tmp_path: Path) -> None:
        frames = [Image.frombytes("L", (60, 60), stroke(59, 60)), *[Image.new("L", (60, 60))] * 9]
        frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:])
        frames[0].save(tmp_path / "b.png")
        first, only = read_pictures(tmp_path).images
        np.testing.assert_array_equal(first, only)

    def test_a_jpeg_of_many_scans(self, tmp_path: Path) -> None:
        """Each is decoded in the size of the whole: a small file may take hours."""
        content = jpeg(progressive=True)
        assert content.count(b"\xff\xda") > 1
        (tmp_path / "a.jpg").write_bytes(content)
        read_pictures(tmp_path / "a.jpg")
        last = content.rindex(b"\xff\xda")
        (tmp_path / "a.jpg").write_bytes(content[:-2] + content[last:-2] * 1000 + content[-2:])
        assert "more than 1,000 scans" in problem(read_pictures, tmp_path / "a.jpg")

    @pytest.mark.parametrize(
        "exif",
        [
            b"Exif\0\0" + b"nonsense" * 9,
            b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0" * 20,
            b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\2\0\0\0\1zzzz\0\0\0\0",
        ],
    )
    def test_corrupt_exif(self, tmp_path: Path, exif: bytes) -> None:
        """Is ignored or refused; nothing else comes of it."""
        (tmp_path / "a.jpg").write_bytes(jpeg(exif=exif))
        with contextlib.suppress(UserError):
            assert len(read_pictures(tmp_path / "a.jpg").images) == 1

    def test_truncated(self, tmp_path: Path) -> None:
        whole = jpeg()
        for size in range(0, len(whole), 9):
            (tmp_path / "a.jpg").write_bytes(whole[:size])
            assert f"--input {tmp_path}/a.jpg: " in problem(read_pictures, tmp_path / "a.jpg")


class TestFolders:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["a.png", "a.npy"])
    def test_no_file(self, tmp_path: Path, kind: str, name: str) -> None:
        no_file(tmp_path / name, kind)
        said = problem(read_pictures, tmp_path)
        assert said.startswith(f"--input {tmp_path / name}: cannot be read (")
        if kind != "folder":
            assert problem(read_pictures, tmp_path / name) == said or name == "a.npy"

    def test_folders_are_closed_again(self, tmp_path: Path) -> None:
        for number in range(100):
            (tmp_path / str(number)).mkdir()
        before = len(list(Path("/proc/self/fd").iterdir()))
        problems(read_pictures, tmp_path)
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_links_to_files_are_fine(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").write_bytes(jpeg())
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "a.jpg").symlink_to("../elsewhere")
        assert read_pictures(tmp_path / "in").sources == ["a.jpg"]

    def test_too_many_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from megakit.data import foreign_images

        monkeypatch.setattr(foreign_images, "MOST_FILES", 5)
        for number in range(5):
            (tmp_path / f"{number}.jpg").write_bytes(jpeg())
        assert len(read_pictures(tmp_path).images) == 5
        (tmp_path / "more").touch()
        assert "more than 5 files" in problem(read_pictures, tmp_path)

    def test_names_break_nothing(self, tmp_path: Path) -> None:
        """Neither messages nor the lines of predictions.csv nor a terminal."""
        for name in (b"a\nb.jpg", b"\x1b[2J.jpg", b"caf\xe9.jpg", b"=1+1.jpg", "é ü.jpg".encode()):
            Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(jpeg())
        sources = read_pictures(tmp_path).sources
        assert sources == ["\\x1b[2J.jpg", "=1+1.jpg", "a\\nb.jpg", "caf\\udce9.jpg", "é ü.jpg"]
        for path in tmp_path.iterdir():
            path.write_bytes(b"")
        said = problems(read_pictures, tmp_path)
        assert len(said) == 5
        beginning = f"--input {tmp_path}/a\\nb.jpg: cannot be read (neither PNG nor JPEG)."
        assert said[2].startswith(beginning)


def test_changed_between_the_check_and_the_ranks(tmp_path: Path) -> None:
    """As a rank sees it: the plan was made, and then the pictures are others, or gone."""
    runs: Any = {"output_dir": tmp_path / "runs", "dataset": "digits", "accelerator": "cpu"}
    make_run(PRETRAIN, PretrainOptions(**runs), (10,))
    make_run(FINETUNE, FinetuneOptions(**runs), (5,))
    picture = tmp_path / "a.jpg"
    picture.write_bytes(jpeg())
    options = PredictOptions(**runs, input=picture)
    plan = prepare_run(options.adapt(PREDICT), options)

    picture.write_bytes(jpeg(quality=5))
    console = Console(silent=True)
    run = Run(PREDICT, PredictOptions(**runs, input=picture), plan, console, True, 0.0)
    said = problem(predict, run)
    assert said == f"--input {picture}: changed since this command began. Start the command again."

    picture.unlink()
    arguments = ("--output-dir", tmp_path / "runs", "--input", picture, "--accelerator", "cpu")
    value, descriptor = plan.for_ranks()
    result = run_script(
        *("model_predict.py", *arguments),
        descriptors=(descriptor,),
        MEGAKIT_PLAN=value,
        timeout=60,
    )
    os.close(descriptor)
    assert result.status == 2
    (line,) = result.err.splitlines()
    assert line.startswith(f"model_predict.py: --input {picture}: cannot be read (No such file")
