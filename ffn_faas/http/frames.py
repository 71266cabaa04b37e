"""Messages over a server-side WebSocket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ValidationError

from ffn_faas.protocol import handshake, messages

log = logging.getLogger(__name__)
POLICY_VIOLATION = 1008
MAX_FRAME_BYTES = 1 << 20
MAX_REASON = 300
FIRST_MESSAGE_TIMEOUT_S = 10.0


async def send(socket: WebSocket, message: BaseModel) -> bool:
    """False when the peer is gone."""
    try:
        await socket.send_text(message.model_dump_json())
    except (WebSocketDisconnect, RuntimeError, OSError):
        return False
    return True


async def refuse(socket: WebSocket, reason: str, *, final: bool = True) -> None:
    """Send Refused with ``reason`` and close."""
    log.warning("refused %s: %s", address(socket), reason)
    if await send(socket, messages.Refused(reason=reason, final=final)):
        await close(socket, POLICY_VIOLATION)


async def close(socket: WebSocket, code: int = 1000) -> None:
    """Close; a peer that is gone already is fine."""
    try:
        await socket.close(code)
    except (WebSocketDisconnect, RuntimeError, OSError):
        return


async def first(socket: WebSocket) -> messages.AnyMessage | None:
    """The peer's first message; None (and the peer told why) when there is none that can be read."""
    try:
        text = await asyncio.wait_for(socket.receive_text(), FIRST_MESSAGE_TIMEOUT_S)
    except (WebSocketDisconnect, KeyError):
        return None
    except asyncio.TimeoutError:
        await refuse(socket, f"first message: nothing within {FIRST_MESSAGE_TIMEOUT_S:.0f} s")
        return None
    foreign = messages.foreign_protocol(text)
    if foreign is not None:
        await refuse(socket, handshake.version_refusal(foreign))
        return None
    try:
        return messages.parse(text)
    except ValidationError as error:
        await refuse(socket, f"first message: {describe(error)}")
        return None


async def pump(socket: WebSocket, put: Callable[[messages.AnyMessage | None], None]) -> None:
    """Pass every message to ``put``; None once, at the end, when the peer is gone or breaks the protocol."""
    try:
        while True:
            put(messages.parse(await socket.receive_text()))
    except (WebSocketDisconnect, KeyError, RuntimeError):
        put(None)
    except ValidationError as error:
        log.warning("%s broke the protocol: %s", address(socket), describe(error))
        put(None)


def address(socket: WebSocket) -> str:
    """host:port of the peer."""
    return f"{socket.client.host}:{socket.client.port}" if socket.client else "a peer"


def describe(error: ValidationError) -> str:
    """One printable line, of bounded length, for a message that does not validate: parts of it are the peer's words."""
    detail = error.errors(include_url=False, include_input=False, include_context=False)[0]
    text = f"{'.'.join(map(str, detail['loc'])) or 'message'}: {detail['msg']}"
    return "".join(character if character.isprintable() else "?" for character in text)[:MAX_REASON]
