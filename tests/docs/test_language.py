"""The pages stay a book that people read: few words, short paragraphs, short cells."""

import re

import pytest

from tests.docs.pages import read_page, read_pages

PAGES = {
    place: text
    for place, text in read_pages().items()
    if place == "README.md" or place.startswith("docs/")
}
#: The most words of README, and of all pages with it. They only go down: who adds, removes.
MOST_WORDS = {"README.md": 2_480, "all": 27_980}


def prose(text: str) -> list[str]:
    """The paragraphs of a page, without code, tables, lists, pictures and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraphs = [one.strip() for one in re.split(r"\n\s*\n", text)]
    return [one for one in paragraphs if not re.match(r"[|#<!>*-]? ?[|#<!-]|\d+\.|\*\d", one)]


def cells(text: str) -> list[str]:
    """The cells of all tables; code counts as a word."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\|(.*)\|$", re.sub(r"`[^`\n]*`", "code", text), re.MULTILINE)
    return [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]


def test_the_book_does_not_grow() -> None:
    words = {place: len(text.split()) for place, text in PAGES.items()}
    words["all"] = sum(words.values())
    print(*(f"{count:6,} {place}" for place, count in words.items()), sep="\n")
    assert {name: words[name] for name, most in MOST_WORDS.items() if words[name] > most} == {}


@pytest.mark.parametrize("place", PAGES)
def test_paragraphs_and_cells_are_short(place: str) -> None:
    assert [one for one in prose(PAGES[place]) if len(one.split()) > 90] == []
    assert [one for one in cells(PAGES[place]) if len(one.split()) >= 25] == []


@pytest.mark.parametrize("place", PAGES)
def test_sentences_do_not_sound_translated(place: str) -> None:
    """Habits of the first releases, which made readers read twice."""
    (text,) = [re.sub(r"^```.*?^```", "", PAGES[place], flags=re.DOTALL | re.MULTILINE)]
    assert len(re.findall(r", so\b", text)) <= 3
    assert len(re.findall(r"\bof (?:your|one's|its) own\b", text)) <= 1
    assert re.findall(r"(?:^|\. )Not \w+ed (?:is|are)\b", text, re.MULTILINE) == []
    assert len(re.findall(r"\bnot tested (?:on|with)\b", text)) <= 1


def test_long_paragraphs_and_cells_are_found() -> None:
    """Else the tests above could not fail."""
    assert len(prose("# Title\n\nOne.\n\n| a | b |\n\n- item\n\nTwo\nlines.\n")) == 2
    assert [one.strip() for one in cells("| a | b |\n|---|---|\n| c | d |\n")][-2:] == ["c", "d"]
    assert read_page("README.md") in PAGES.values()
