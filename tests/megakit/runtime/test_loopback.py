"""The loopback interface, which is down in a new network namespace."""

import fcntl
import socket
import sys

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # from C++

from megakit.errors import UserError
from megakit.runtime.loopback import ensure_loopback, port_of, reserve_port
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

FOUR_PORTS = """
import contextlib, socket
from pathlib import Path
from megakit.runtime.loopback import ensure_loopback, reserve_port

def count(make):
    with contextlib.ExitStack() as sockets:
        for number in range(9):
            try:
                sockets.enter_context(make())
            except OSError:
                break
        return number

ensure_loopback()
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40003")
with reserve_port(), socket.create_server(("127.0.0.1", 50000)) as server:
    servers = count(lambda: socket.create_server(("127.0.0.1", 0)))
    clients = count(lambda: socket.create_connection(server.getsockname()))
    print(f"{servers} servers, {clients} clients")
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


def test_a_reserved_port_is_for_torchs_store_alone() -> None:
    with reserve_port() as reserved:
        port = int(port_of(reserved))
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True)
        client = TCPStore("127.0.0.1", port)
        client.set("name", "value")
        assert store.get("name") == b"value"


def test_no_other_process_is_given_a_reserved_port() -> None:
    """Where only four ports are left, three can be had, to listen at and to call from."""
    if run("unshare", "--net", "true").status:
        pytest.skip("no network namespace can be made here")
    done = run("unshare", "--net", sys.executable, "-c", FOUR_PORTS, cwd=REPOSITORY)
    assert done.output() == "3 servers, 3 clients\n"
