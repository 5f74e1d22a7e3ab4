"""Links and pictures of the pages, beyond what `test_site.py` checks: HTML, pictures, the network.

`./run tests tests/docs/test_links.py -n 0 -s --all` prints all outside links, and checks them if
the machine has a network.
"""

import http.client
import re
import urllib.error
import urllib.request
import xml.etree.ElementTree
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jupytext
import pytest
from PIL import Image

from tests.docs.test_site import DOCUMENTS, anchors, links, tokens
from tests.scripts import REPOSITORY

NOTEBOOK = Path("notebooks/mnist_megatron.py")
#: Answers by which a server says that a page does not exist; other errors say nothing about it.
GONE = (404, 410)
SECONDS = 15


class _Html(HTMLParser):
    """Collects the targets of an HTML text's links and pictures, and the pictures' texts."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.pictures: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.targets += [values[name] for name in ("href", "src") if name in values]
        if tag == "img":
            self.pictures.append((values["src"], values.get("alt", "")))


def html_of(path: Path) -> _Html:
    """What a page's pieces of HTML lead to."""
    found = _Html()
    for token in tokens(path):
        if token.type in ("html_block", "html_inline"):
            found.feed(token.content)
    return found


def pictures(path: Path) -> list[tuple[str, str]]:
    """A page's pictures: their places and their alternative texts."""
    marked = [(str(t.attrGet("src")), t.content) for t in tokens(path) if t.type == "image"]
    return marked + html_of(path).pictures


@cache
def notebook_links() -> list[str]:
    """Where the links in the notebook's text lead."""
    cells = jupytext.read(REPOSITORY / NOTEBOOK).cells
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    return [link for text in texts for link in re.findall(r"\]\(([^)]+)\)", text)]


@cache
def outside_links() -> dict[str, list[str]]:
    """All links out of the project, without their anchors, with the pages that have them."""
    found = defaultdict(list)
    for page in DOCUMENTS:
        path = REPOSITORY / page
        for link in [*links(path), *html_of(path).targets]:
            if re.match(r"https?:", link):
                found[link.partition("#")[0]].append(str(page))
    for link in notebook_links():
        if re.match(r"https?:", link):
            found[link.partition("#")[0]].append(str(NOTEBOOK))
    return {link: sorted(set(found[link])) for link in sorted(found)}


def answer(link: str) -> int | None:
    """The status of a link's server, or None if the server cannot be reached."""
    request = urllib.request.Request(link, headers={"User-Agent": "Mozilla/5.0 (link check)"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):  # no network, no such host, or a time-out
        return None


@pytest.mark.parametrize(
    "page", [page for page in DOCUMENTS if pictures(REPOSITORY / page)], ids=str
)
def test_pictures_can_be_drawn_and_have_a_text(page: Path) -> None:
    for place, text in pictures(REPOSITORY / page):
        path = (REPOSITORY / page).parent / unquote(place)
        assert path.is_file(), place
        if path.suffix == ".svg":
            assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            with Image.open(path) as picture:
                picture.verify()
        assert len(text.split()) >= 2 or text == "Growth", f"{place}: {text!r} describes nothing"


def test_links_in_html_and_in_the_notebook_lead_somewhere() -> None:
    found = [(page, link) for page in DOCUMENTS for link in html_of(REPOSITORY / page).targets]
    assert found
    found += [(NOTEBOOK, link) for link in notebook_links()]
    assert found[-1][0] == NOTEBOOK
    for page, link in found:
        file, _, anchor = unquote(link).partition("#")
        if urlsplit(link).scheme:
            continue
        target = (REPOSITORY / page.parent / file).resolve() if file else REPOSITORY / page
        assert target.is_file(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_outside_links_are_encrypted_and_complete() -> None:
    assert outside_links()
    for link, places in outside_links().items():
        print(link, *places)
        parts = urlsplit(link)
        assert parts.scheme == "https", link
        assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), link


@pytest.mark.long
def test_outside_links_answer() -> None:
    every = list(outside_links())
    with ThreadPoolExecutor(8) as threads:
        answers = dict(zip(every, threads.map(answer, every), strict=True))
    for link, status in answers.items():
        print(status or "not reached", link, *outside_links()[link])
    gone = [link for link, status in answers.items() if status in GONE]
    assert gone == [], {link: outside_links()[link] for link in gone}
    unreached = [link for link, status in answers.items() if status is None]
    if unreached:
        pytest.skip(f"no network to {len(unreached)} of {len(every)} outside links")


def test_html_is_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '<p><img src="a.png" alt="A text"> <a href="b.md#c">b</a></p>\n\n'
        'In a line: <img src="d.png">. ![Of Markdown](e.svg)\n\n```\n<img src="in-code.png">\n```\n'
    )
    assert html_of(page).targets == ["a.png", "b.md#c", "d.png"]
    assert sorted(pictures(page)) == [("a.png", "A text"), ("d.png", ""), ("e.svg", "Of Markdown")]


def test_a_server_that_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: urllib.request.Request, timeout: float) -> None:
        if "gone" in request.full_url:
            raise urllib.error.HTTPError(request.full_url, 404, "Not Found", None, None)  # type: ignore[arg-type]
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert answer("https://a.b/gone") == 404
    assert answer("https://a.b/there") is None
