"""Clients that are slow on purpose, or many: they end, and others are answered."""

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from serving import Served, client_of, served
from small_project import wait_for

from realmops.serve.guard import Limits

CROWD = 2000  # connections, fewer where this machine does not let one process have so many
HEAD = b"POST /v1/answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def impatient(answering: Path) -> Iterator[Served]:
    """A server that waits less than its clients will take."""
    with served(answering / "root", limits={"head_seconds": 1, "body_seconds": 1, "read_seconds": 1}) as one:
        yield one


def connect(server: Served) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), 30)


def dripped(server: Served, head: bytes, drip: bytes) -> bytes:
    """The reply to a head, and to a byte again and again until the server has had enough of it."""
    found, ended = b"", threading.Event()
    with connect(server) as connection:

        def send() -> None:
            with suppress(OSError):
                while not ended.wait(0.1):
                    connection.sendall(drip)

        connection.sendall(head)
        thread = threading.Thread(target=send)
        thread.start()
        try:
            with suppress(ConnectionError):
                while piece := connection.recv(1 << 16):
                    found += piece
        finally:
            ended.set()
            thread.join()
    return found


@pytest.mark.parametrize("before", [b"", b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_head_that_comes_byte_by_byte_ends(impatient: Served, before: bytes) -> None:
    """After an answer on the same connection, too; no byte moves the deadline."""
    reply = dripped(impatient, before + b"GET /health/live HTTP/1.1\r\nX-Slow: ", b"a")
    assert reply.count(b"HTTP/1.1 200 ") == bool(before)
    assert b"HTTP/1.1 408 " in reply
    assert b"request head timed out: incomplete after 1 s" in reply
    assert impatient.ask()["answer"]


def test_a_body_that_comes_byte_by_byte_ends(impatient: Served) -> None:
    reply = dripped(impatient, HEAD + b"Content-Length: 100000\r\n\r\n", b" ")
    assert reply.startswith(b"HTTP/1.1 408 "), reply
    assert b"request body timed out: incomplete after 1 s" in reply
    assert impatient.ask()["answer"]


def test_the_rest_of_a_body_that_was_refused_is_not_awaited(impatient: Served) -> None:
    head = HEAD.replace(b"localhost", b"pages.example") + b"Content-Length: 100000\r\n\r\n"
    assert dripped(impatient, head, b" ").startswith(b"HTTP/1.1 403 ")


def test_a_connection_that_says_nothing_ends_without_a_word(impatient: Served) -> None:
    with connect(impatient) as connection:
        assert connection.recv(100) == b""


def test_who_does_not_read_his_answers_is_dropped(impatient: Served) -> None:
    """Requests behind one another, whose answers nobody takes, until the server sends no more of them."""
    with connect(impatient) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with pytest.raises(ConnectionError):
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000_000)
    assert impatient.ask()["answer"]


@contextmanager
def many_files() -> Iterator[int]:
    """How many connections this process may have, its limit raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = CROWD + 512 if hard == resource.RLIM_INFINITY else min(hard, CROWD + 512)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        yield min(CROWD, max(soft, most) - 512)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def patient(answering: Path) -> Iterator[tuple[Served, int]]:
    """A server that waits so long that nothing but the bound on their number ends connections, and how many it gets."""
    limits = {"head_seconds": 600, "body_seconds": 600}
    with many_files() as count, served(answering / "root", limits=limits) as server:
        yield server, count


@pytest.mark.parametrize("begin", [b"", HEAD + b"Content-Length: 9\r\n\r\n"], ids=["silent", "body"])
def test_two_thousand_idle_connections_shut_nobody_out(patient: tuple[Served, int], begin: bytes) -> None:
    server, count = patient
    with ExitStack() as stack:
        if count < CROWD:
            print(f"the limit of open files leaves {count} of {CROWD} connections")
        assert count > 600, "more than are let in"
        crowd = []
        for place in range(count):
            crowd.append(stack.enter_context(connect(server)))
            crowd[-1].sendall(begin)
            if place % 250 == 0:
                assert server.call("/health/live")[0] == 200
        assert server.call("/health/ready")[0] == 200
        assert server.ask()["answer"]
        crowd[0].settimeout(30)
        with suppress(ConnectionError):
            assert crowd[0].recv(100) == b"", "the oldest has ended"
        crowd[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            crowd[-1].recv(100)
        files = Path(f"/proc/{server.process.pid}/fd")
        wait_for(lambda: len(list(files.iterdir())) < 1024, 30, server.process)


def test_as_many_connections_wait_as_the_limit_says(answering: Path) -> None:
    """One more ends the one that has waited longest, and no other."""
    limits = {"head_seconds": 600, "waiting": 2}
    with served(answering / "root", limits=limits) as server, ExitStack() as stack:
        first, second = (stack.enter_context(connect(server)) for _ in range(2))
        third = stack.enter_context(connect(server))
        first.settimeout(30)
        with suppress(ConnectionError):
            assert first.recv(100) == b""
        for waiting in (second, third):
            waiting.setblocking(False)
            with pytest.raises(BlockingIOError):
                waiting.recv(100)


def test_probes_are_answered_when_no_more_requests_are(answering: Path) -> None:
    probes = ("/health/live", "/health/ready", "/v2/health/ready")
    with client_of(answering / "root", Limits(answering=0)) as client:
        refused = client.post("/v1/answer", json={"question": "Who?"})
        assert (refused.status_code, "retry later" in refused.json()["error"]["message"]) == (503, True)
        assert refused.headers["retry-after"] == "1"
        assert [client.get(path).status_code for path in probes] == [200] * 3
