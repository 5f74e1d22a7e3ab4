"""The links and pictures of pages and notebook lead somewhere: .ci/run builds the site."""

import re
from pathlib import Path
from urllib.parse import unquote

from tests.docs.pages import read_page, read_pages
from tests.scripts import REPOSITORY

CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:href|src)=\"([^\"]*)\"")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts (and MyST) make them from their texts."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    texts = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def broken(place: str, text: str) -> list[str]:
    """Links of a page to files or headings of the project that are not there."""
    wrong = []
    for link in (markdown or html for markdown, html in LINK.findall(CODE.sub("", text))):
        file, _, anchor = unquote(link).partition("#")
        page = REPOSITORY / place
        target = page.parent / file if file else page
        if not re.match(r"[a-z]+:", link) and (
            not target.is_file() or (anchor and anchor not in anchors(target))
        ):
            wrong.append(link)
    return wrong


def test_links_lead_somewhere() -> None:
    notebook = "notebooks/mnist_megatron.py"
    pages = {**read_pages(), notebook: read_page(notebook)}
    assert broken("README.md", "[a](docs/index.md#none) [b](docs) ![c](x.png)") == [
        *("docs/index.md#none", "docs", "x.png")
    ]
    assert len(LINK.findall(pages["README.md"])) > 20
    wrong = {place: broken(place, text) for place, text in pages.items()}
    assert {place: links for place, links in wrong.items() if links} == {}
