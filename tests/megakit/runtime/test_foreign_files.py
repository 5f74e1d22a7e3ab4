"""Files that somebody else may have written: what is read, and how a refusal is worded."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megakit.errors import UserError
from megakit.runtime.foreign_files import (
    brief,
    first,
    printable,
    read_regular_file,
    reading,
    reason_of,
    regular_file_size,
)


def test_whatever_a_parser_raises_is_one_printable_line() -> None:
    with pytest.raises(UserError) as caught, reading("a\nfile", "Use another."):
        raise RecursionError("too\x1bdeep\nin line 7")
    expected = "a\\nfile: cannot be read (RecursionError: too\\x1bdeep). Use another."
    assert caught.value.problems == [expected]


def test_a_refusal_that_says_why_is_left_as_it_is() -> None:
    with pytest.raises(UserError) as caught, reading("file", "Use another."):
        raise UserError("its width is 7")
    assert caught.value.problems == ["its width is 7"]


def test_printable() -> None:
    kept = "r\u00e9sum\u00e9 \u00a0\u2003\u6f22 7"
    assert (
        printable(kept + "\t\x1b[31m\u2028\ud800\u202e")
        == kept + "\\t\\x1b[31m\\u2028\\ud800\\u202e"
    )


def test_brief() -> None:
    assert brief("a" * 200) == "a" * 200
    assert brief("a" * 101 + "b" * 100) == "a" * 100 + "..." + "b" * 60


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("of a library"), "OSError: of a library"),
        (KeyError("width"), "KeyError: 'width'"),
        (ValueError("two\nlines"), "two"),
        (TypeError("not a number"), "not a number"),
        (MemoryError(), "MemoryError"),
        (ValueError("x" * 300), "x" * 200),
    ],
    ids=repr,
)
def test_reasons(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_of_many_problems_the_first_are_told() -> None:
    problems = [str(number) for number in range(1021)]
    assert first(problems[:20]) == problems[:20]
    assert first(problems) == [*problems[:20], "1,001 more like these."]


@pytest.mark.parametrize("size", [0, 1, 10])
def test_a_file_within_the_limit(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    assert read_regular_file(path, 10) == b"x" * size
    assert regular_file_size(path, 10) == size


@pytest.mark.parametrize("read", [read_regular_file, regular_file_size])
def test_a_file_beyond_the_limit(tmp_path: Path, read: Callable[[Path, int], object]) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # its content would not fit into memory
    with pytest.raises(ValueError, match="1,099,511,627,776 bytes; at most 10 are accepted"):
        read(path, 10)


@pytest.mark.parametrize("read", [read_regular_file, regular_file_size])
@pytest.mark.parametrize("name", ["fifo", "/dev/zero"])
def test_no_regular_file(tmp_path: Path, read: Callable[[Path, int], object], name: str) -> None:
    """Nor does anything wait for a writer."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="not a regular file"):
        read(tmp_path / name, 10)


def test_a_file_that_is_longer_than_the_system_says() -> None:
    """As those of /proc, and one that grows meanwhile."""
    path = Path("/proc/self/environ")
    content = path.read_bytes()
    assert path.stat().st_size == 0
    assert read_regular_file(path, 1 << 20) == content
    with pytest.raises(ValueError, match="more than 2 bytes"):
        read_regular_file(path, 2)
