"""Reads the project's pages: their blocks of code, and the commands in them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.scripts import REPOSITORY


def read_page(place: str) -> str:
    return (REPOSITORY / place).read_text()


def read_pages() -> dict[str, str]:
    """The texts of all pages by their places; what changed once is no page."""
    places = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", "template/*.md")
    paths = sorted(path for place in places for path in REPOSITORY.glob(place))
    names = [str(path.relative_to(REPOSITORY)) for path in paths]
    return {name: read_page(name) for name in names if name != "CHANGELOG.md"}


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def lines_of(block: str) -> list[str]:
    """The lines of a block of bash; one that ends with a backslash is joined with the next."""
    return [line for line in re.sub(r"\\\n\s*", "", block).splitlines() if line.strip()]


def copy_project(folder: Path) -> Path:
    """Copies the project's files into a folder, and returns the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split(b"\0")):
        source, target = REPOSITORY / os.fsdecode(name), folder / os.fsdecode(name)
        if source.is_file():  # a deleted file is listed until the next commit
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder
