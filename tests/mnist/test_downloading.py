"""MNIST downloaded by torchvision from servers of the tests' own, which may hang or lie."""

from pathlib import Path

import pytest

from mnist.files import MNIST_SHA256, find_dataset
from mnist.idx_files import read_file
from tests.mnist.made_up import TEST_IMAGES, TRAIN_IMAGES, files_below, link_files


@pytest.mark.usefixtures("mirror")
def test_only_what_is_missing(made_up_mnist: Path, tmp_path: Path) -> None:
    mine = (TRAIN_IMAGES, TEST_IMAGES)
    root = link_files(made_up_mnist, tmp_path / "data" / "MNISTCustom" / "raw", mine)
    folder, lines = root / "MNISTCustom" / "raw", list[str]()
    for _ in range(2):  # nothing is downloaded twice
        assert find_dataset(root, "auto", lines.append) == "mnist"
    assert lines == [f"Downloaded MNIST to {folder}."]
    assert files_below(tmp_path) == sorted(MNIST_SHA256)
    assert [name for name in MNIST_SHA256 if (folder / name).is_symlink()] == [*mine]
    for name in MNIST_SHA256:
        read_file(root, name)


def test_nothing_is_written_unless_all_is_right(
    mirror: Path, packed: dict[str, bytes], tmp_path: Path
) -> None:
    """The last of the files is sent in part."""
    name = [*packed][-1]
    (mirror / name).write_bytes(packed[name][:-9])
    lines: list[str] = []
    assert find_dataset(tmp_path / "data", "auto", lines.append) == "digits"
    assert "ended before the end" in lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.usefixtures("silent_mirror")
def test_a_mirror_that_hangs(tmp_path: Path) -> None:
    lines: list[str] = []
    assert find_dataset(tmp_path, "auto", lines.append) == "digits"
    assert "timed out" in lines[0]
