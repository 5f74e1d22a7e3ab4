"""Ranks that find rank 0 of their job: threads in the place of processes, real sockets."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.store import join_store, join_torchruns_store


@pytest.fixture(autouse=True)
def same_environment():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@contextlib.contextmanager
def stranger(says=b""):
    """A program that listens at a port of its own, and greets or says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with contextlib.suppress(OSError), contextlib.ExitStack() as held:
                while True:
                    connection, _ = server.accept()
                    held.enter_context(connection)
                    connection.sendall(says)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def job(*ports, name="4711.0"):
    return Cluster("srun", devices=2, address="127.0.0.1", ports=ports, name=name)


def meet(cluster, timeout=20):
    """What rank 1 reads of what rank 0 wrote."""

    def rank_0():
        with join_store(cluster, timeout) as store:
            store.set("plan", "ours")
            assert store.get("read") == b"yes"

    def rank_1():
        with join_store(replace(cluster, rank=1), timeout) as store:
            found = store.get("plan")
            store.set("read", "yes")
            return found

    with ThreadPoolExecutor(2) as pool:
        later = pool.submit(rank_1)  # it comes first, and asks again
        time.sleep(0.2)
        pool.submit(rank_0).result(timeout=60)
        return later.result(timeout=60)


def test_they_meet():
    port = free_port()
    assert meet(job(port)) == b"ours"
    assert os.environ["MASTER_PORT"] != str(port)
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"


@pytest.mark.parametrize(
    "says",
    [
        *(b"", b"HTTP/1.1 400\r\n", b"\xff" * 5000),
        *(b"megakit 4712.0/2 80\n", b"megakit 4711.0/2 70000\n", "megakit 4711.0/2 ²\n".encode()),
    ],
)
def test_a_program_at_the_first_port_is_passed_over(says):
    with stranger(says) as taken:
        assert meet(job(taken, free_port())) == b"ours"


@pytest.mark.parametrize("change", [{"name": "4712.0"}, {"devices": 3}], ids=str)
def test_two_jobs_with_the_same_ports(change):
    port, other = free_port(), free_port()
    with join_store(replace(job(port, other), **change), 20):
        assert meet(job(port, other)) == b"ours"


def test_no_port_is_free():
    with (
        stranger() as taken,
        pytest.raises(UserError, match=rf"{taken}: .* cannot listen at it \(another program"),
        join_store(job(taken), 20),
    ):
        pass


@pytest.mark.parametrize("says", [None, b"", b"megakit 1.0/2 80\n"])
def test_no_rank_0_in_time(says):
    cluster = replace(job(free_port()), rank=1)
    with contextlib.ExitStack() as stack:
        if says is not None:
            cluster = replace(cluster, ports=(stack.enter_context(stranger(says)),))
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"No rank 0 at 127\.0\.0\.1, port \d+, within 1 s"):
            stack.enter_context(join_store(cluster, 1))
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("address", ["no-such-machine.invalid", "0.0.0.1"])
def test_an_address_that_is_not_rank_0_s(address):
    cluster = replace(job(free_port()), address=address)
    with (
        pytest.raises(UserError, match=f"MASTER_ADDR {address}: rank 0 does not reach itself"),
        join_store(cluster, 20),
    ):
        pass


def test_another_program_answers_at_rank_0_s_address(monkeypatch):
    monkeypatch.setattr("megakit.job.store._request_port", lambda *_, **__: None)
    with (
        pytest.raises(UserError, match=r"does not reach itself there, .*another program answers"),
        join_store(job(free_port()), 20),
    ):
        pass


def test_the_port_is_free_after_the_block():
    port = free_port()
    with join_store(job(port), 20):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def test_the_store_of_torchrun_s_agent():
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # made in C++

    port = free_port()
    with pytest.raises(TimeoutError, match=rf"No rank 0 at 127\.0\.0\.1, port {port}, within 0 s"):
        join_torchruns_store(job(port), 0)
    agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    agent.set("plan", "ours")
    assert join_torchruns_store(job(port), 20).get("plan") == b"ours"
