"""One WebSocket from this A rank to one F rank: reached with patience, then read by a thread of its own."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ffn_faas.connectors import keepalive
from ffn_faas.credentials import Credentials
from ffn_faas.errors import HandshakeRefused, SessionLost
from ffn_faas.protocol.messages import AnyMessage, Attach, Granted, Message, Progress, Refused, parse

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

RETRY_S = 0.5
LOG_EVERY_S = 5.0
ANSWER_S = 10.0
ATTACH_PATH = "/v1/attach"


class FLink:
    """The attach socket to F rank ``rank`` at ``address`` (host:port). ``phase`` and ``progress`` are F's last word."""

    def __init__(self, rank: int, address: str, log: logging.Logger) -> None:
        self.rank = rank
        self.address = address
        self.phase = "STARTING"
        self.progress = 0.0
        self.granted: Granted | None = None
        self._log = log
        self._stack = ExitStack()
        self._socket: ClientConnection | None = None
        self._reader: threading.Thread | None = None

    def __str__(self) -> str:
        return f"F rank {self.rank} at {self.address}"

    @property
    def peer_host(self) -> str:
        """Where the connection really goes: the address that F was reached at."""
        return str(self._connected().remote_address[0])

    def attach(self, attach: Attach, credentials: Credentials, timeout_s: float) -> Granted:
        """Connect, retrying until F answers, and attach. Blocks for up to ``timeout_s``, with a log line every 5 s.

        Raises HandshakeRefused with F's own text, or SessionLost naming role, rank and address when F never answers.
        """
        patience = _Patience(f"A rank {attach.attention_rank}", str(self), timeout_s, self._log)
        try:
            self.granted = self._attach(attach, credentials, patience)
        except BaseException:
            self._stack.close()
            raise
        return self.granted

    def read(self, on_message: Callable[[FLink, AnyMessage], None], on_close: Callable[[FLink, str], None]) -> None:
        """Start the reader thread: ``on_message`` for every message but Progress, ``on_close`` once at the end."""
        self._reader = threading.Thread(
            target=self._read, args=(on_message, on_close), name=f"ffn_faas-F{self.rank}", daemon=True
        )
        self._reader.start()

    def send(self, message: Message) -> None:
        """Raises SessionLost when the socket is closed."""
        from websockets.exceptions import ConnectionClosed

        socket = self._connected()
        try:
            socket.send(message.model_dump_json())
        except ConnectionClosed as error:
            raise SessionLost(f"{self} closed the connection ({error})") from None

    def close(self) -> None:
        """Close the socket, which ends the reader thread. Idempotent; may block for about a second."""
        self._stack.close()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout=1.0)

    def _attach(self, attach: Attach, credentials: Credentials, patience: _Patience) -> Granted:
        while True:
            try:
                self._socket = self._stack.enter_context(self._connect(credentials, patience.left()))
                return self._handshake(attach, patience)
            except _NotYet as not_yet:
                self._stack.close()
                patience.spend(str(not_yet))
                time.sleep(RETRY_S)

    def _connected(self) -> ClientConnection:
        if self._socket is None:
            raise SessionLost(f"{self} is not connected")
        return self._socket

    def _connect(self, credentials: Credentials, left: float) -> ClientConnection:
        from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
        from websockets.sync.client import connect

        try:
            socket = connect(
                f"{credentials.scheme}://{self.address}{ATTACH_PATH}",
                additional_headers=credentials.headers(),
                ssl=credentials.ssl_context(),
                compression=None,
                proxy=None,
                open_timeout=max(0.1, min(ANSWER_S, left)),
                close_timeout=1.0,
                ping_interval=None,
            )
            keepalive.watch(socket.socket)
            return socket
        except InvalidStatus as error:
            status = error.response.status_code
            if status >= 500:
                raise _NotYet(f"HTTP status {status}") from None
            remedy = (
                "give FFN_FAAS_TOKEN or connector_extra_config.token_file F's token"
                if status in (401, 403)
                else "check afd.host and afd.port"
            )
            raise HandshakeRefused(f"{self} answered the attach with HTTP status {status}", remedy=remedy) from None
        except ssl.SSLCertVerificationError as error:
            raise HandshakeRefused(
                f"the certificate of {self} is not accepted: {error.verify_message}",
                remedy="name its issuer in connector_extra_config.tls_ca_file, and F by a host name of the certificate",
            ) from None
        except (OSError, InvalidHandshake, ConnectionClosed, EOFError) as error:
            raise _NotYet(_why(error)) from None

    def _handshake(self, attach: Attach, patience: _Patience) -> Granted:
        message = self._answer(attach, patience)
        if isinstance(message, Refused) and not message.final:
            raise _NotYet(message.reason)
        if isinstance(message, Refused):
            raise HandshakeRefused(f"{self} refused this Attention rank: {message.reason}")
        if not isinstance(message, Granted):
            raise HandshakeRefused(f"{self} answered the attach with {message.type!r}")
        if message.ffn_rank != self.rank:
            raise HandshakeRefused(
                f"{self} says that it is F rank {message.ffn_rank}",
                remedy="afd.port must be the port of F rank 0",
            )
        return message

    def _answer(self, attach: Attach, patience: _Patience) -> AnyMessage:
        """The first message that is no Progress. Never sends the attach twice: the first may still be answered."""
        from pydantic import ValidationError
        from websockets.exceptions import ConnectionClosed

        socket = self._connected()
        try:
            socket.send(attach.model_dump_json())
            while True:
                try:
                    message = parse(socket.recv(timeout=RETRY_S))
                except TimeoutError:
                    patience.spend("connected, but it has not answered the attach")
                    continue
                if not isinstance(message, Progress):
                    return message
                self.phase, self.progress = message.phase, message.progress
                patience.spend(f"connected, it is {message.phase}")
        except ConnectionClosed as error:
            raise _NotYet(_why(error)) from None
        except ValidationError as error:
            raise HandshakeRefused(
                f"{self} answered what this version of ffn_faas does not understand: {error.errors()[0]['msg']}",
                remedy="install matching versions of ffn_faas",
            ) from None

    def _read(self, on_message: Callable[[FLink, AnyMessage], None], on_close: Callable[[FLink, str], None]) -> None:
        from pydantic import ValidationError
        from websockets.exceptions import ConnectionClosed

        reason = "the thread that reads from it failed"
        try:
            for frame in self._connected():
                message = parse(frame)
                if isinstance(message, Progress):
                    self.phase, self.progress = message.phase, message.progress
                else:
                    on_message(self, message)
            reason = "the connection closed"
        except ConnectionClosed as error:
            reason = f"the connection broke: {_why(error)}"
        except ValidationError as error:
            reason = f"it sent what this version of ffn_faas does not understand: {error.errors()[0]['msg']}"
        finally:
            on_close(self, reason)


class _Patience:
    """Counts the time spent waiting for one F rank; logs every 5 s, raises SessionLost when it is used up."""

    def __init__(self, who: str, whom: str, timeout_s: float, log: logging.Logger) -> None:
        self._who, self._whom, self._timeout_s, self._log = who, whom, timeout_s, log
        self._started = self._next_log = time.monotonic()

    def left(self) -> float:
        return self._timeout_s - (time.monotonic() - self._started)

    def spend(self, why: str) -> None:
        now = time.monotonic()
        spent = now - self._started
        if spent + RETRY_S > self._timeout_s:
            raise SessionLost(
                f"{self._who}: {self._whom} did not answer within {self._timeout_s:g} s ({why})",
                remedy="start F with `python -m ffn_faas serve`, check afd.host and afd.port, "
                "or raise connector_extra_config.attach_timeout_s",
            )
        if now >= self._next_log:
            self._log.info("Waiting for %s: %s (%.0f s of %.0f s)", self._whom, why, spent, self._timeout_s)
            self._next_log = now + LOG_EVERY_S


class _NotYet(Exception):
    """F cannot be reached now; trying again may help."""


def _why(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip()
