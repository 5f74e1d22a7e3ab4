"""MNIST's files that are hostile: one message each, within bounded memory and at once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mnist.files import MNIST_SHA256, find_dataset, read_mnist
from tests.hostile import KINDS, MEGABYTE, bomb, no_file, problem, refused_within, run_apart
from tests.mnist.made_up import TEST_IMAGES, TEST_LABELS, content_of, made_up, pack, replace


@pytest.fixture
def raw(root: Path) -> Path:
    """A folder of links to files in MNIST's format whose content counts as MNIST's."""
    return root / "MNIST" / "raw"


class TestMnist:
    def test_truncated_while_it_is_used(self, raw: Path) -> None:
        replace(raw / TEST_IMAGES, (raw / TEST_IMAGES).read_bytes())
        code = f"""
import os, sys
from pathlib import Path
from mnist import files as mnist_files
root = Path(sys.argv[1])
mnist_files.MNIST_SHA256.update({dict(MNIST_SHA256)!r})
images, labels = mnist_files.read_mnist(root, train=False)
os.truncate(root / "MNIST" / "raw" / "t10k-images-idx3-ubyte", 0)
print(int(images.sum()), len(labels))
"""
        expected = int(made_up(TEST_IMAGES).sum())
        assert run_apart(code, raw.parents[1]).split() == [str(expected), "10000"]

    def test_what_is_used_is_what_was_checked(self, raw: Path) -> None:
        """A file that is replaced after the check is noticed by the ranks that read it."""
        root = raw.parents[1]
        assert find_dataset(root, "mnist") == "mnist"
        replace(raw / TEST_LABELS, b"\1" * 10_008)
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
        assert find_dataset(root, "digits") == "digits"


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
            (lambda packed: packed[:200] + b"\0" * 9 + packed[209:], "rror"),
            (lambda packed: b"<html>", "incorrect header"),
            (lambda packed: pack(b"other"), "5 bytes, expected 10,008"),
            (lambda packed: packed + b"more", "has further bytes after"),
            (lambda packed: packed + packed, "has further bytes after"),
            (lambda packed: packed[:-8] + bytes(8), "incorrect data check"),
            (lambda packed: b"", "ends before the end"),
        ],
    )
    def test_streams(self, path: Path, spoil: Callable[[bytes], bytes], fault: str) -> None:
        packed = pack(content_of(TEST_LABELS))
        path.write_bytes(packed)
        assert find_dataset(path.parents[2], "mnist") == "mnist"
        path.write_bytes(spoil(packed))
        assert fault in problem(find_dataset, path.parents[2], "mnist")
