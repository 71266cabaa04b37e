"""Hands the descriptors of windows to the one peer they are meant for, over an abstract Unix socket.

A peer connects, sends its ticket (64 bytes) and gets one byte back: OK with [arena, doorbell] as descriptors, or
REFUSED followed by a reason. Abstract sockets leave no file, and are reachable only from the same network namespace.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffn_faas._native import Arena

OK = b"\0"
REFUSED = b"\1"
TICKET_BYTES = 64
_PATIENCE_S = 1.0
_CREDENTIALS = struct.Struct("3i")

log = logging.getLogger(__name__)


class Broker:
    """Serves until ``close``; one small thread. The descriptors stay F's own."""

    def __init__(self, doorbell: int) -> None:
        self.name = f"ffn_faas-{secrets.token_hex(16)}"
        self._doorbell = doorbell
        self._offers: dict[str, Arena] = {}
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(b"\0" + self.name.encode())
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, name="ffn_faas-broker", daemon=True)
        self._thread.start()

    def offer(self, arena: Arena) -> str:
        """A new ticket for this arena, good for one peer."""
        ticket = secrets.token_hex(TICKET_BYTES // 2)
        with self._lock:
            self._offers[ticket] = arena
        return ticket

    def withdraw(self, ticket: str) -> None:
        """The ticket is worth nothing from now on. Idempotent."""
        with self._lock:
            self._offers.pop(ticket, None)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            self._offers.clear()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                peer.settimeout(_PATIENCE_S)
                try:
                    self._answer(peer)
                except OSError as error:
                    log.warning("A peer left the broker of windows without them: %s", error)

    def _answer(self, peer: socket.socket) -> None:
        presented = b""
        while len(presented) < TICKET_BYTES:
            part = peer.recv(TICKET_BYTES - len(presented))
            if not part:
                return
            presented += part
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid not in (0, os.getuid()):
            peer.sendall(REFUSED + f"user {uid} is not user {os.getuid()}, whose windows these are".encode())
            return
        with self._lock:
            arena = self._redeem(presented)
            if arena is not None:
                socket.send_fds(peer, [OK], [arena.fd, self._doorbell])
                return
        peer.sendall(REFUSED + b"the ticket is unknown, used or withdrawn")

    def _redeem(self, presented: bytes) -> Arena | None:
        """Every ticket is compared, in constant time."""
        match = None
        for ticket in self._offers:
            if hmac.compare_digest(ticket.encode(), presented):
                match = ticket
        return self._offers.pop(match) if match is not None else None
