"""Files that somebody else may have written: what is read, and how a refusal is worded."""

from pathlib import Path

import pytest

from megakit.errors import UserError, brief, first, printable, reading, reason_of
from megakit.runtime.foreign_files import read_regular_file


def test_whatever_a_parser_raises_is_one_printable_line() -> None:
    with pytest.raises(UserError) as caught, reading("a\nfile", "Use another."):
        raise RecursionError("too\x1bdeep\nin line 7")
    expected = "a\\nfile: cannot be read (RecursionError: too\\x1bdeep). Use another."
    assert caught.value.problems == [expected]


def test_printable() -> None:
    kept = "r\u00e9sum\u00e9 \u00a0\u2003\u6f22 7"
    assert (
        printable(kept + "\t\x1b[31m\u2028\ud800\u202e")
        == kept + "\\t\\x1b[31m\\u2028\\ud800\\u202e"
    )


def test_long_texts_and_lists_are_shortened() -> None:
    assert brief("a" * 101 + "b" * 100) == "a" * 100 + "..." + "b" * 60
    problems = [str(number) for number in range(1021)]
    assert first(problems) == [*problems[:20], "1,001 more like these."]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("of a library"), "OSError: of a library"),
        (KeyError("width"), "KeyError: 'width'"),
        (ValueError("two\nlines"), "two"),
        (MemoryError(), "MemoryError"),
    ],
    ids=repr,
)
def test_reasons(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_limit_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert read_regular_file(path, 10) == b"x" * 10
    with pytest.raises(ValueError, match="10 bytes; at most 9 are accepted"):
        read_regular_file(path, 9)
