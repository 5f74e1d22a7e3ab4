"""Pictures that are too large, too many or oddly named: one message each."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mnist import own_pictures
from mnist.own_pictures import read_pictures
from tests.hostile import problem, problems


def png(width: int, height: int) -> bytes:
    """A PNG file without pixels."""

    def chunk(kind: bytes, content: bytes = b"") -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT") + chunk(b"IEND")


def jpeg() -> bytes:
    file = io.BytesIO()
    picture = np.zeros((60, 60), np.uint8)
    picture[10:50, 25:35] = 255
    Image.fromarray(picture).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize(("width", "height"), [(20_001, 3), (10_000, 5_001)])
def test_too_many_pixels(tmp_path: Path, width: int, height: int) -> None:
    path = tmp_path / "huge.png"
    path.write_bytes(png(width, height))
    said = problem(read_pictures, path)
    assert "50,000,000 pixels at most, and 20,000 a side" in said


def test_a_bomb(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png(100_000, 100_000))
    assert "50,000,000 pixels at most, and 20,000 a side" in problem(read_pictures, path)


def test_too_many_scans(tmp_path: Path) -> None:
    path = tmp_path / "scans.jpg"
    path.write_bytes(jpeg() + b"\xff\xda" * 1000)
    assert "more than 1,000 scans: save it as a plain JPEG" in problem(read_pictures, path)


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_pictures, "MOST_PICTURES", 5)
    for number in range(5):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg())
    assert len(read_pictures(tmp_path).images) == 5
    (tmp_path / "more").touch()
    assert "more than 5 files" in problem(read_pictures, tmp_path)


def test_names_break_nothing(tmp_path: Path) -> None:
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
