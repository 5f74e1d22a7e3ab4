"""Pictures that are hostile: one message each, within bounded memory and at once."""

import contextlib
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megakit.errors import UserError
from megakit.job.script import Run
from megakit.reporting.console import Console
from mnist.own_pictures import read_pictures
from model_finetune import FINETUNE, FinetuneOptions
from model_predict import PREDICT, PredictOptions, predict
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import make_run, prepare_run
from tests.hostile import KINDS, MEGABYTE, no_file, problem, problems, refused_within
from tests.scripts import run_script


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


def riff(kind: bytes, content: bytes) -> bytes:
    """A WebP file with one chunk."""
    body = b"WEBP" + kind + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp(**options: Any) -> bytes:
    file = io.BytesIO()
    picture = np.zeros((60, 90), np.uint8)
    picture[10:50, 25:35] = 255
    Image.fromarray(picture).save(file, "WEBP", **options)
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

    @pytest.mark.parametrize(
        "content",
        [
            riff(b"VP8X", bytes(4) + (16_382).to_bytes(3, "little") * 2),
            riff(b"VP8X", bytes(4) + b"\xff" * 6),
            riff(b"VP8L", b"\x2f" + struct.pack("<I", 16_383 << 14 | 16_383)),
            riff(b"VP8 ", b"\x10\0\0\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383)),
        ],
    )
    def test_a_webp_of_too_many_pixels(self, tmp_path: Path, content: bytes) -> None:
        """By its header, before Pillow opens it: opening allocates the pixels."""
        (tmp_path / "a.webp").write_bytes(content + bytes(100))
        said = refused_within(10, "own_pictures.read_pictures(path)", tmp_path / "a.webp")
        assert "25,000,000 pixels at most, and 20,000 a side" in said

    @pytest.mark.parametrize(
        "options",
        [
            {"lossless": True},
            {"quality": 90},
            {"quality": 90, "exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"},
            {"save_all": True, "append_images": [Image.new("L", (90, 60))] * 9},
        ],
    )
    def test_the_size_of_a_webp_is_read_from_its_header(
        self, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        from megakit.data.foreign_images import _webp_size

        assert _webp_size(webp(**options)) == (90, 60)
        (tmp_path / "a").write_bytes(webp(**options))
        (tmp_path / "b").write_bytes(webp(lossless=True))
        first, second = read_pictures(tmp_path).images
        assert abs((first > 127).sum() - (second > 127).sum()) <= 20

    def test_a_frame_larger_than_the_header_of_a_webp(self, tmp_path: Path) -> None:
        content = bytearray(webp(exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"))
        at = content.index(b"VP8X") + 12
        content[at : at + 6] = b"\x05\0\0\x05\0\0"
        (tmp_path / "a.webp").write_bytes(content)
        assert "cannot be read" in problem(read_pictures, tmp_path / "a.webp")

    def test_a_large_webp(self, tmp_path: Path) -> None:
        """Of 25 million pixels, in colour and half transparent: the most memory that one takes."""
        path = tmp_path / "a.webp"
        Image.new("RGBA", (5_000, 5_000), (9, 8, 7, 200)).save(path, lossless=True, method=0)
        said = refused_within(1000, "own_pictures.read_pictures(path)", path)
        assert "contains no ink" in said

    def test_a_truncated_webp(self, tmp_path: Path) -> None:
        whole = webp(lossless=True)
        for size in range(0, len(whole), 5):
            (tmp_path / "a").write_bytes(whole[:size])
            assert f"--input {tmp_path}/a: " in problem(read_pictures, tmp_path / "a")

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
        beginning = f"--input {tmp_path}/a\\nb.jpg: cannot be read (neither PNG nor JPEG nor WEBP)."
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
        *("model_predict.py", *arguments), descriptors=(descriptor,), MEGAKIT_PLAN=value, timeout=60
    )
    os.close(descriptor)
    assert result.status == 2
    (line,) = result.err.splitlines()
    assert line.startswith(f"model_predict.py: --input {picture}: cannot be read (No such file")
