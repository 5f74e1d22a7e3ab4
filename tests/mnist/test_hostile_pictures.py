"""Pictures that are too large, too many or oddly named: one message each."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mnist.own_pictures import read_pictures
from tests.hostile import problem, problems


def chunk(kind: bytes, content: bytes) -> bytes:
    """A part of a PNG file."""
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def jpeg() -> bytes:
    file = io.BytesIO()
    picture = np.zeros((60, 60), np.uint8)
    picture[10:50, 25:35] = 255
    Image.fromarray(picture).save(file, "JPEG")
    return file.getvalue()


class TestPictures:
    @pytest.mark.parametrize(("width", "height"), [(20_001, 3), (10_000, 5_001)])
    def test_too_many_pixels(self, tmp_path: Path, width: int, height: int) -> None:
        """By its header alone: the file has no pixels."""
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
        path = tmp_path / "huge.png"
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
        said = problem(read_pictures, path)
        assert "50,000,000 pixels at most, and 20,000 a side" in said


class TestFolders:
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
