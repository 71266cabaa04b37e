"""Windows of A ranks on other hosts, F's side: who may connect, and what carries their posts and answers.

A peer connects to the data port, sends its ticket (64 bytes) and gets one byte back: OK, or REFUSED followed by a
reason. After OK the connection carries posts one way and answers the other (protocol.stream).
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ffn_faas import native
from ffn_faas.connectors import keepalive
from ffn_faas.connectors.base import TCP
from ffn_faas.connectors.broker import OK, REFUSED, TICKET_BYTES
from ffn_faas.errors import HandshakeRefused, ResourceError

if TYPE_CHECKING:
    from ffn_faas import _native

MAX_STRANGERS = 64
"""Connections that have not shown a ticket yet, at a time."""
_PATIENCE_S = 5.0

log = logging.getLogger(__name__)


class DataPort:
    """Listens until ``close``. Every method may be called from any thread; all but ``__init__`` return at once."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keepalive.watch(self._listener)
            self._listener.bind((host, port))
            self._listener.listen(128)
        except OSError as error:
            self._listener.close()
            raise ResourceError(
                f"cannot listen for data on {host}:{port}: {error.strerror}", remedy="give another --data-port"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._offers: dict[str, socket.socket | None] = {}
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        self._thread = threading.Thread(target=self._serve, name="ffn_faas-data-port", daemon=True)
        self._thread.start()

    def offer(self) -> str:
        """A new ticket, good for one connection."""
        ticket = secrets.token_hex(TICKET_BYTES // 2)
        with self._lock:
            self._offers[ticket] = None
        return ticket

    def take(self, ticket: str) -> socket.socket:
        """The connection that came with ``ticket``; it is the caller's. Raises HandshakeRefused when none came."""
        with self._lock:
            connection = self._offers.pop(ticket, None)
        if connection is None:
            raise HandshakeRefused("windows_mapped came before the data connection", remedy="connect to the data port")
        return connection

    def withdraw(self, ticket: str) -> None:
        """The ticket is worth nothing from now on, and what came with it is closed. Idempotent."""
        with self._lock:
            connection = self._offers.pop(ticket, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Stop listening; connections that were taken stay. Idempotent."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for ticket in list(self._offers):
            self.withdraw(ticket)

    def _serve(self) -> None:
        while True:
            try:
                peer, address = self._listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                log.warning(
                    "%s was turned away from the data port: %d others have shown no ticket", address, MAX_STRANGERS
                )
                peer.close()
                continue
            threading.Thread(target=self._greet, args=(peer,), name="ffn_faas-data-greet", daemon=True).start()

    def _greet(self, peer: socket.socket) -> None:
        try:
            peer.settimeout(_PATIENCE_S)
            if not self._admitted(peer):
                peer.close()
        except OSError as error:
            log.warning("A peer left the data port without its windows: %s", error)
            peer.close()
        finally:
            self._strangers.release()

    def _admitted(self, peer: socket.socket) -> bool:
        presented = b""
        while len(presented) < TICKET_BYTES:
            part = peer.recv(TICKET_BYTES - len(presented))
            if not part:
                return False
            presented += part
        with self._lock:
            # Every ticket is compared, in constant time.
            match = [ticket for ticket in self._offers if hmac.compare_digest(ticket.encode(), presented)]
            if match and self._offers[match[0]] is None:
                peer.settimeout(None)
                peer.sendall(OK)
                self._offers[match[0]] = peer
                return True
        peer.sendall(REFUSED + b"the ticket is unknown, used or withdrawn")
        return False


class RemoteLinks:
    """What stands between a ``DataPort`` and one receiver: the connection of each remote link, by its key."""

    def __init__(self, receiver: _native.ItemReceiver, host: str, port: int) -> None:
        self._native = native.load()
        self._receiver = receiver
        self._port = DataPort(host, port)
        self._mirrors: dict[int, _native.ServiceMirror] = {}
        self.broker = f"{TCP}{self._port.port}"

    def offer(self) -> str:
        return self._port.offer()

    def withdraw(self, ticket: str) -> None:
        self._port.withdraw(ticket)

    def start(self, link: int, ticket: str, arena: _native.Arena) -> None:
        """Carry the posts of ``link``, which the receiver knows already. Raises HandshakeRefused."""
        connection = self._port.take(ticket)
        self._mirrors[link] = self._native.ServiceMirror(connection.detach(), arena, self._receiver, link)

    def stop(self, link: int) -> None:
        """End the connection of ``link``. Idempotent; blocks for less than a millisecond."""
        mirror = self._mirrors.pop(link, None)
        if mirror is not None:
            mirror.close()

    def close(self) -> None:
        self._port.close()
        for link in list(self._mirrors):
            self.stop(link)
