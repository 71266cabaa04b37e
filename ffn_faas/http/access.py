"""Who may do what on the management port: reading is open, whatever changes something needs the token."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pydantic import BaseModel

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_METHODS = ("GET", "HEAD", "OPTIONS")
WITHOUT = "the token is missing or wrong (Authorization: Bearer ...); give this side F's FFN_FAAS_TOKEN"
BROWSER = "requests of web pages (with an Origin header) are not served without a token"

log = logging.getLogger(__name__)


class Refusal(BaseModel):
    """Why a request was not served."""

    reason: str


REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": Refusal, "description": "F has a token, and the request does not show it"},
    403: {"model": Refusal, "description": "F has no token, and a web page asks"},
}
"""What ``TokenGuard`` answers, for the schema of the routes that it guards."""


class TokenGuard:
    """ASGI middleware. Without a token everything is open, except to web pages in a browser of this host."""

    def __init__(self, app: App, token: str | None) -> None:
        self._app = app
        self._expected = _digest(f"Bearer {token}".encode()) if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, reason = refusal
        log.warning("%s from %s: %s", scope["path"], (scope.get("client") or ("unknown",))[0], reason)
        await _deny(scope, send, status, reason)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        changes = scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] not in OPEN_METHODS)
        if not changes:
            return None
        headers = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"origin")]
        if self._expected is None:
            return (403, BROWSER) if any(name == b"origin" for name, _ in headers) else None
        shown = [value for name, value in headers if name == b"authorization"]
        # Digests have one length, so that not even the token's length shows in the time that this takes.
        if len(shown) == 1 and hmac.compare_digest(_digest(shown[0]), self._expected):
            return None
        return 401, WITHOUT


def _digest(header: bytes) -> bytes:
    return hashlib.sha256(header).digest()


async def _deny(scope: Scope, send: Send, status: int, reason: str) -> None:
    kind = "http.response"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
            return
        kind = "websocket.http.response"
    body = json.dumps({"reason": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
