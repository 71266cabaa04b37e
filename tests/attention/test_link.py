"""However a connection breaks while F dies or starts, the attach is tried again, and every end is told."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ffn_faas.attention.link import FLink
from ffn_faas.credentials import NOTHING
from ffn_faas.errors import SessionLost

from .fake_f import ATTACH, Peer, fake_f, granted

LOG = logging.getLogger("tests.attention")


def at_once(connection: socket.socket) -> None:
    connection.close()


def after_the_request(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.close()


def with_a_reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def in_the_middle_of_the_answer(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 101 Switching")
    connection.close()


@contextmanager
def breaking(how: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[int]]]:
    """A port whose connections end as ``how`` does it; yields its address and the list that grows with each."""
    seen: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    seen.append(1)
                    how(connection)
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", seen
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("how", [at_once, after_the_request, with_a_reset, in_the_middle_of_the_answer])
def test_a_connection_that_breaks_before_it_is_open_is_tried_again(how: Callable[[socket.socket], None]) -> None:
    with breaking(how) as (address, seen):
        link = FLink(0, address, LOG)
        with pytest.raises(SessionLost, match=r"did not answer within 1\.2 s"):
            link.attach(ATTACH, NOTHING, 1.2)
    assert len(seen) >= 2


def test_a_reader_that_fails_still_tells_that_the_link_is_over() -> None:
    ended, told = threading.Event(), []

    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(granted(addresses))
        peer.say(granted(addresses))
        ended.wait(10)

    def on_message(link: FLink, message: object) -> None:
        raise MemoryError

    def on_close(link: FLink, reason: str) -> None:
        told.append(reason)
        ended.set()

    before, threading.excepthook = threading.excepthook, lambda _: None
    try:
        with fake_f(script) as addresses:
            link = FLink(0, addresses[0], LOG)
            link.attach(ATTACH, NOTHING, 10)
            link.read(on_message, on_close)
            assert ended.wait(10)
            link.close()
    finally:
        threading.excepthook = before
    assert told == ["the thread that reads from it failed"]
