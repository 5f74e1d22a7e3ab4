"""Folders of made-up files, a mirror that serves them, and one that does not answer."""

import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mnist import downloading
from tests.mnist.made_up import SHAPES, content_of, link_files


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
def serving(folder: Path) -> Iterator[str]:
    """Serves the files of a folder; yields its address."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def mirror(
    made_up_mnist: Path,
    packed: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """The folder of a server with all files, the only one that is asked."""
    folder = tmp_path_factory.mktemp("mirror")
    for name, content in packed.items():
        (folder / name).write_bytes(content)
    with serving(folder) as address:
        monkeypatch.setattr(downloading, "MIRRORS", (address,))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No mirror answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(downloading, "MIRRORS", (f"http://127.0.0.1:{free.getsockname()[1]}/",))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield
