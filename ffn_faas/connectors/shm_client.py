"""Shared memory between processes of one host: how an A rank gets at its windows."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from ffn_faas.connectors.base import WindowGeometry, WindowOffer
from ffn_faas.connectors.broker import OK, REFUSED
from ffn_faas.connectors.shm import native_geometry
from ffn_faas.errors import HandshakeRefused, ResourceError
from ffn_faas.native import load

if TYPE_CHECKING:
    from ffn_faas import _native


def fetch_windows(offer: WindowOffer, geometry: WindowGeometry, epoch: int, timeout: float) -> _native.Arena:
    """Get the descriptors of ``offer`` from F's broker and map them; blocks up to ``timeout`` seconds.

    The arena goes to ``AttentionClient.set_link``. Raises ResourceError when the broker cannot be reached or memory
    cannot be mapped, HandshakeRefused when the broker refuses the ticket or the windows are not as agreed.
    """
    arena_fd, doorbell_fd = _redeem(offer, timeout)
    try:
        arena: _native.Arena = load().Arena.map(arena_fd, doorbell_fd, native_geometry(geometry), epoch)
    except ValueError as error:
        raise HandshakeRefused(str(error), remedy="run the same version of ffn_faas on both sides") from error
    except OSError as error:
        raise ResourceError(f"the windows cannot be mapped: {error}") from error
    return arena


def _redeem(offer: WindowOffer, timeout: float) -> tuple[int, int]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as broker:
        broker.settimeout(timeout)
        try:
            broker.connect(b"\0" + offer.broker.encode())
            broker.sendall(offer.ticket.encode())
            answer, descriptors, _, _ = socket.recv_fds(broker, 4096, 2)
        except OSError as error:
            raise ResourceError(
                f"F's broker of shared memory cannot be reached: {error}",
                remedy="A and F must run on one host and in one network namespace (containers: share it, for example"
                " --network container:F or hostNetwork), and F must still be running",
            ) from error
    if answer[:1] == OK and len(descriptors) == 2:
        return descriptors[0], descriptors[1]
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
    reason = answer[1:].decode(errors="replace") if answer[:1] == REFUSED else "it closed the connection"
    raise HandshakeRefused(f"F's broker did not hand over the windows: {reason}", remedy="attach again")
