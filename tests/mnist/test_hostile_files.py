"""MNIST's files that are damaged, or replaced after they were checked: one message each."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mnist.files import find_dataset, read_mnist
from tests.hostile import problem
from tests.mnist.made_up import TEST_LABELS, content_of, pack, replace


@pytest.fixture
def raw(root: Path) -> Path:
    """A folder of links to files in MNIST's format whose content counts as MNIST's."""
    return root / "MNIST" / "raw"


class TestMnist:
    def test_what_is_used_is_what_was_checked(self, raw: Path) -> None:
        """A file that is replaced after the check is noticed by the ranks that read it."""
        root = raw.parents[1]
        assert find_dataset(root, "mnist") == "mnist"
        replace(raw / TEST_LABELS, b"\1" * 10_008)
        assert f"{raw / TEST_LABELS}: sha256 " in problem(read_mnist, root, False)
        (raw / TEST_LABELS).unlink()
        assert f"{raw / TEST_LABELS}: missing" in problem(read_mnist, root, False)

    def test_a_root_that_is_no_folder(self, tmp_path: Path) -> None:
        root = tmp_path / "data"
        root.write_text("")
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

    @pytest.mark.parametrize(
        ("spoil", "fault"),
        [
            (lambda packed: packed[:-9], "ends before the end"),
            (lambda packed: b"<html>", "incorrect header"),
            (lambda packed: pack(b"other"), "5 bytes, expected 10,008"),
            (lambda packed: packed[:-8] + bytes(8), "incorrect data check"),
        ],
    )
    def test_streams(self, path: Path, spoil: Callable[[bytes], bytes], fault: str) -> None:
        packed = pack(content_of(TEST_LABELS))
        path.write_bytes(packed)
        assert find_dataset(path.parents[2], "mnist") == "mnist"
        path.write_bytes(spoil(packed))
        assert fault in problem(find_dataset, path.parents[2], "mnist")
