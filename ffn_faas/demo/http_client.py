"""The few HTTP requests of the demo and of commands that ask F, past any proxy."""

from __future__ import annotations

import http.client
import json
from typing import Any

from ffn_faas.credentials import NOTHING, Credentials


def request(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    timeout_s: float = 5.0,
    host: str = "127.0.0.1",
    credentials: Credentials = NOTHING,
) -> tuple[int, Any]:
    """(status, JSON body or None). Raises OSError or http.client.HTTPException when there is no answer."""
    context = credentials.ssl_context()
    connection = (
        http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
        if context is not None
        else http.client.HTTPConnection(host, port, timeout=timeout_s)
    )
    try:
        payload = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json", **credentials.headers()}
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        text = response.read()
        return response.status, _json_or_none(text)
    finally:
        connection.close()


def _json_or_none(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
