"""The documents' links and pictures lead somewhere: .ci/run builds the site."""

import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import jupytext
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.scripts import REPOSITORY

DOCUMENTS = sorted(
    path.relative_to(REPOSITORY)
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md")
    for path in REPOSITORY.glob(pattern)
)
NOTEBOOK = Path("notebooks/mnist_megatron.py")
HTML_TARGET = re.compile(r'\b(?:href|src)="([^"]*)"')


@cache
def text_of(path: Path) -> str:
    """A document's Markdown; of a notebook, that of its text cells."""
    if path.suffix == ".md":
        return path.read_text()
    cells = jupytext.read(path).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


@cache
def tokens(path: Path) -> list[Token]:
    """A document's tokens, the inline ones among them; those of code blocks are not looked into."""
    blocks = MarkdownIt("commonmark").enable("table").parse(text_of(path))
    return [token for block in blocks for token in (block, *(block.children or []))]


def html_of(path: Path) -> str:
    """A document's pieces of HTML."""
    return "\n".join(t.content for t in tokens(path) if t.type in ("html_block", "html_inline"))


def links(path: Path) -> list[str]:
    """Where a document's links and images lead, those in HTML among them."""
    found = [str(t.attrGet("href") or t.attrGet("src") or "") for t in tokens(path)]
    return [*filter(None, found), *HTML_TARGET.findall(html_of(path))]


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as code hosts (and MyST) make them from their texts."""
    found: Counter[str] = Counter()
    names = set()
    for heading, inline in pairwise(tokens(path)):
        if heading.type != "heading_open":
            continue
        parts = [part for part in inline.children or [] if part.type in ("text", "code_inline")]
        text = "".join(part.content for part in parts)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def broken(path: Path) -> list[str]:
    """Links of a document to files or headings that are not there."""
    wrong = []
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            continue  # leads out of the project
        file, _, anchor = unquote(link).partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            wrong.append(f"{link}: no such file")
        elif target.is_dir():
            wrong.append(f"{link}: a folder, for which the site has no page")
        elif anchor and anchor not in anchors(target):
            wrong.append(f"{link}: no such heading")
    return wrong


def test_links_lead_somewhere():
    assert {Path("README.md"), Path("docs/index.md"), Path("benchmarks/RESULTS.md")} < {*DOCUMENTS}
    wrong = {str(page): broken(REPOSITORY / page) for page in (*DOCUMENTS, NOTEBOOK)}
    assert {page: found for page, found in wrong.items() if found} == {}
