"""A WebSocket peer without a thread of its own, that says what it likes and goes without a goodbye."""

from __future__ import annotations

import socket

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Close, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

ANSWER_S = 10.0


class FramePeer:
    """Connected once it is made; raises AssertionError when the port takes no connection."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), ANSWER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{port}{path}"), max_size=None)
        self._heard: list[str] = []
        self._protocol.send_request(self._protocol.connect())
        self._flush()
        while self._protocol.state is State.CONNECTING and self._read():
            pass
        if self._protocol.state is not State.OPEN:
            raise AssertionError(f"the port no longer takes connections: {self._protocol.handshake_exc}")

    def send(self, message: str | bytes) -> bool:
        """Whether F has not yet closed this connection."""
        try:
            if isinstance(message, str):
                self._protocol.send_text(message.encode())
            else:
                self._protocol.send_binary(message)
            self._flush()
        except (InvalidState, OSError):
            return False
        return True

    def hear(self, seconds: float) -> str | None:
        """The kind of the next message, or how F closed; None after so many seconds of silence, or after the end."""
        self._socket.settimeout(seconds)
        try:
            while not self._heard:
                if not self._read():
                    return None
        except OSError:  # a timeout is one too
            return None
        return self._heard.pop(0)

    def _read(self) -> bool:
        """Take what arrives next; False at the end of the stream."""
        data = self._socket.recv(1 << 16)
        self._protocol.receive_data(data) if data else self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                if event.opcode is Opcode.CLOSE:
                    self._heard.append(f"closed {Close.parse(event.data).code}")
                elif event.opcode is Opcode.TEXT:
                    self._heard.append(bytes(event.data[:24]).decode().partition(",")[0])
        return bool(data)

    def _flush(self) -> None:
        for part in self._protocol.data_to_send():
            if part:
                self._socket.sendall(part)

    def close(self) -> None:
        self._socket.close()
