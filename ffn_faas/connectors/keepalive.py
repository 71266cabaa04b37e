"""Ends a connection whose host has vanished; a process that is stopped or busy keeps it, its kernel answers for it."""

from __future__ import annotations

import socket

PROBE_S = 5
"""A silent connection is probed after, and every, so many seconds."""
DEAD_AFTER_S = 15
"""What was sent and stays unacknowledged for so long, probes included, ends the connection."""


def watch(connection: socket.socket) -> None:
    """For a connected socket, or a listening one, whose connections inherit it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_AFTER_S // PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
