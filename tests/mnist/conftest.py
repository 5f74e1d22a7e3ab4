"""A folder of made-up files, mirrors that serve them, hang or lie, and no network at all."""

import gzip
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mnist import idx_files
from tests.mnist.made_up import SHAPES, content_of, link_files


@pytest.fixture
def root(made_up_mnist: Path, tmp_path: Path) -> Path:
    """A root whose files lead to the made-up ones, for a test to replace some."""
    return link_files(made_up_mnist, tmp_path / "data" / "MNIST" / "raw")


@pytest.fixture(scope="session")
def packed() -> dict[str, bytes]:
    """The four files as a mirror sends them."""
    return {f"{name}.gz": gzip.compress(content_of(name), 1) for name in SHAPES}


def ask(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torchvision ask one server, and accept made-up files."""
    before = (
        f"from torchvision.datasets import MNIST\nMNIST.mirrors = [{address!r}]\n"
        "MNIST.resources = [(name, None) for name, _ in MNIST.resources]\n"
    )
    monkeypatch.setattr(idx_files, "DOWNLOAD", before + idx_files.DOWNLOAD)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


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
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        ask(f"http://127.0.0.1:{server.server_port}/", monkeypatch)
        yield folder
        server.shutdown()
        thread.join()


@pytest.fixture
def silent_mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The only mirror accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ask(f"http://127.0.0.1:{server.getsockname()[1]}/", monkeypatch)
        yield


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No download succeeds, and torchvision is not imported for it."""
    monkeypatch.setattr(idx_files, "DOWNLOAD", "raise OSError('no network')")
