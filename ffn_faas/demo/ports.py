"""Free TCP ports on 127.0.0.1."""

from __future__ import annotations

import random
import socket
import zlib

from ffn_faas.errors import ResourceError

_FIRST, _LAST = 20000, 32000
"""Below Linux's ephemeral range, so that no outgoing connection takes one meanwhile."""
_MOST = 64
"""A fixed number, so that the same key gives the same first port for any count."""


def free_ports(count: int = 1, key: str | None = None) -> int:
    """The first of ``count`` consecutive ports that are free now. Raises ResourceError when none are found.

    The same ``key`` gives the same port where it is free: F's address is a part of the key of vLLM's compile cache, so
    a demo that runs again in its work directory need not compile again.
    """
    if count > _MOST:
        raise ResourceError(f"{count} consecutive ports were asked for, at most {_MOST} can be")
    choose = random.Random(None if key is None else zlib.crc32(key.encode()))  # noqa: S311 - no secret
    for _ in range(200):
        first = choose.randrange(_FIRST, _LAST - _MOST)
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
