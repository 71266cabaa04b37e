"""Free TCP ports on 127.0.0.1."""

from __future__ import annotations

import random
import socket

from ffn_faas.errors import ResourceError

_FIRST, _LAST = 20000, 32000
"""Below Linux's ephemeral range, so that no outgoing connection takes one meanwhile."""


def free_ports(count: int = 1) -> int:
    """The first of ``count`` consecutive ports that are free now. Raises ResourceError when none are found."""
    for _ in range(200):
        first = random.randrange(_FIRST, _LAST - count)  # noqa: S311 - no secret
        if all(_is_free(first + offset) for offset in range(count)):
            return first
    raise ResourceError(f"no {count} consecutive free ports between {_FIRST} and {_LAST} on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
