"""The loopback interface, which is down in a new network namespace."""

import fcntl
import socket
import sys

import pytest

from megakit.errors import UserError
from megakit.runtime.loopback import ensure_loopback, free_port
from tests.scripts import REPOSITORY, run

PROGRAM = """
import socket
from megakit.runtime.loopback import ensure_loopback

def is_up():
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            socket.create_connection(server.getsockname(), timeout=5).close()
        except OSError:
            return False
    return True

print(is_up())
for _ in range(2):
    ensure_loopback()
    print(is_up())
"""


def test_it_is_brought_up_and_left_up() -> None:
    if run("unshare", "--net", "true").status:
        pytest.skip("no network namespace can be made here")
    alone = run("unshare", "--net", sys.executable, "-c", PROGRAM, cwd=REPOSITORY)
    assert alone.output().split() == ["False", "True", "True"]


def test_where_it_may_not_be_brought_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    with pytest.raises(UserError, match=r"lo is down \(Operation not .*ip link set lo up\."):
        ensure_loopback()


def test_a_free_port() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] >= 1024
