"""Folders of made-up files, mirrors that serve them, and mirrors that do not answer."""

import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mnist import downloading
from tests.mnist.made_up import SHAPES, Mirror, content_of, link_files


@pytest.fixture
def root(made_up_mnist: Path, tmp_path: Path) -> Path:
    """A root whose files lead to the made-up ones, for a test to replace some."""
    return link_files(made_up_mnist, tmp_path / "data" / "MNIST" / "raw")


@pytest.fixture(scope="session")
def packed() -> dict[str, bytes]:
    """The four files as a mirror sends them."""
    return {f"{name}.gz": gzip.compress(content_of(name), 1) for name in SHAPES}


@pytest.fixture
def lines() -> list[str]:
    return []


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Mirror]:
    with Mirror(files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def mirror(
    made_up_mnist: Path, packed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mirror]:
    """A server with all files, the only one that is asked."""
    with serving(dict(packed)) as server:
        monkeypatch.setattr(downloading, "MIRRORS", (server.url,))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No mirror answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(downloading, "MIRRORS", (f"http://127.0.0.1:{free.getsockname()[1]}/",))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield
