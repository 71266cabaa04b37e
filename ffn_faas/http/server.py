"""uvicorn in a thread of its own, on a socket that was bound before anything else happened."""

from __future__ import annotations

import socket
import ssl
import threading
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from ffn_faas.connectors import keepalive
from ffn_faas.errors import ResourceError, UsageError
from ffn_faas.http.frames import MAX_FRAME_BYTES


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on host:port. Raises ResourceError when it is taken or the host is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keepalive.watch(listener)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            remedy="another process has the port, or the host is not this machine's; give another --port or --host",
        ) from None
    return listener


@dataclass(frozen=True)
class TlsFiles:
    """PEM files, as uvicorn takes them; a key of None is in the certificate's file."""

    certificate: str
    key: str | None = None

    def check(self) -> None:
        """Raise UsageError unless the two can be read and belong together."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except OSError as error:  # ssl.SSLError is one
            raise UsageError(
                f"--ssl-certfile {self.certificate} with --ssl-keyfile {self.key} cannot be used: {error}"
            ) from None


class HttpServer:
    """Serves ``app`` on ``listener`` until ``shutdown``."""

    def __init__(self, app: FastAPI, listener: socket.socket, tls: TlsFiles | None = None) -> None:
        self._listener = listener
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="websockets-sansio",
                ws_ping_interval=None,
                ws_max_size=MAX_FRAME_BYTES,
                timeout_graceful_shutdown=2,
                ssl_certfile=tls.certificate if tls else None,
                ssl_keyfile=tls.key if tls else None,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="ffn-http", daemon=True)

    def start(self) -> None:
        """Return when requests are answered."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(0.01)
        if not self._server.started:
            raise ResourceError("the HTTP server did not start", remedy="see the log above")

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Close all connections and end the thread, waiting at most ``timeout_s``. Idempotent."""
        self._server.should_exit = True
        self._thread.join(timeout_s)
        self._listener.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._listener])
