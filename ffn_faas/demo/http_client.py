"""The few HTTP requests of the demo and of ``wait`` and ``stop``, past any proxy."""

from __future__ import annotations

import http.client
import json
from typing import Any


def request(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    timeout_s: float = 5.0,
    host: str = "127.0.0.1",
    token: str | None = None,
) -> tuple[int, Any]:
    """(status, JSON body or None). Raises OSError or http.client.HTTPException when there is no answer."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
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
