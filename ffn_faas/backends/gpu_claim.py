"""One F rank a GPU: told by its UUID, whatever index a launcher's masks leave to it."""

from __future__ import annotations

import errno
import socket
import time

from ffn_faas.errors import ResourceError

PATIENCE_S = 5.0


def claim(uuid: str, *, share: bool, patience_s: float = PATIENCE_S) -> socket.socket | None:
    """An abstract Unix socket named after the GPU; held while this rank serves, gone however its process ends.

    Waits up to ``patience_s`` for an F rank that is just ending. Raises ResourceError while another one of this host
    (network namespace) has the GPU; with ``share`` (functional tests only) that is None at once instead.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            held.bind(f"\0ffn_faas-gpu-{uuid}".encode())
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                held.close()
                raise ResourceError(f"GPU {uuid} cannot be claimed: {error.strerror}") from error
        else:
            return held
        if share or time.monotonic() > deadline:
            held.close()
            break
        time.sleep(0.1)
    if share:
        return None
    raise ResourceError(
        f"GPU {uuid} already serves another F rank of this host",
        remedy="give each rank a GPU of its own (--device-ids, CUDA_VISIBLE_DEVICES), or start all of them with "
        "--share-device for functional tests: they take turns, milliseconds a round trip",
    )
