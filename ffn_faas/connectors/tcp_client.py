"""Windows on another host: how an A rank gets at them."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ffn_faas import native
from ffn_faas.connectors import keepalive
from ffn_faas.connectors.base import TCP, WindowGeometry, WindowOffer
from ffn_faas.connectors.broker import OK, REFUSED
from ffn_faas.connectors.shm import native_geometry
from ffn_faas.errors import HandshakeRefused, ResourceError
from ffn_faas.memory import require_memory

if TYPE_CHECKING:
    from ffn_faas import _native


def connect_windows(offer: WindowOffer, geometry: WindowGeometry, epoch: int, timeout: float) -> _native.Arena:
    """Windows of this process, joined by a connection to those of F; blocks up to ``timeout`` seconds.

    The connection ends with the arena's last user; ``Arena.failure`` says when it ended before. Raises ResourceError
    when the data port cannot be reached or memory cannot be had, HandshakeRefused when F refuses the ticket.
    """
    shape = native_geometry(geometry)
    require_memory(shape.offsets()["nbytes"], f"windows of {geometry.capacity} rows")
    host, _, port = offer.broker.removeprefix(TCP).rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise HandshakeRefused(f"F names data port {port!r}")
    try:
        connection = socket.create_connection((host, int(port)), timeout)
    except OSError as error:
        raise ResourceError(
            f"F's data port {host}:{port} cannot be reached: {error}",
            remedy="open it as well as the management port; --data-port fixes its number",
        ) from error
    with connection:
        try:
            _redeem(connection, offer.ticket)
            connection.settimeout(None)
            keepalive.watch(connection)
        except OSError as error:
            raise ResourceError(f"F's data port {host}:{port} does not answer: {error}") from error
        try:
            arena: _native.Arena = native.load().connect_windows(connection.detach(), shape, epoch)
        except OSError as error:
            raise ResourceError(f"windows cannot be made: {error.strerror or error}") from error
        return arena


def _redeem(connection: socket.socket, ticket: str) -> None:
    connection.sendall(ticket.encode())
    # One byte at first: what follows OK belongs to the stream.
    answer = connection.recv(1)
    if answer == OK:
        return
    reason = connection.recv(4096).decode(errors="replace") if answer == REFUSED else "it closed the connection"
    raise HandshakeRefused(f"F's data port did not hand over the windows: {reason}", remedy="attach again")
