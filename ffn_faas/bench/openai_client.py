"""The two requests that a replay makes of an OpenAI server."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any
from urllib.parse import urlsplit

from ffn_faas.errors import ResourceError, UsageError

_TIMEOUT_S = 600.0


class OpenAiServer:
    """A connection for each thread that asks. Raises UsageError for a URL that is none, ResourceError when the server
    cannot be reached or answers with an error."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--deployments: {url!r} is no URL", remedy="http://HOST:PORT")
        self._url, self._parts = url, parts
        self._connections = threading.local()
        self._opened: list[http.client.HTTPConnection] = []
        try:
            self.model: str = self._request("GET", "/v1/models", None)["data"][0]["id"]
        except (LookupError, TypeError):
            raise ResourceError(f"{url}/v1/models names no model") from None
        finally:
            self.close()
            self._connections = threading.local()

    def complete(self, request: dict[str, Any]) -> int:
        """Answer one completion request; returns how many tokens it got. Blocks."""
        answer = self._request("POST", "/v1/completions", {**request, "model": self.model, "stream": False})
        try:
            return int(answer["usage"]["completion_tokens"])
        except (LookupError, TypeError):
            raise ResourceError(f"{self._url} did not say how many tokens it answered") from None

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        payload = None if body is None else json.dumps(body)
        prefix = self._parts.path.rstrip("/").removesuffix("/v1")
        try:
            connection = self._connection()
            connection.request(method, prefix + path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            answer = json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connections.open = None
            raise ResourceError(f"{self._url}{path} does not answer: {error}") from error
        if response.status != 200:
            raise ResourceError(f"{self._url}{path} answered with HTTP {response.status}: {text[:300]!r}")
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        kept: http.client.HTTPConnection | None = getattr(self._connections, "open", None)
        if kept is None:
            kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            kept = self._connections.open = kind(str(self._parts.hostname), self._parts.port, timeout=_TIMEOUT_S)
            self._opened.append(kept)
        return kept

    def close(self) -> None:
        """Close the connections of all threads, none of which may be asking."""
        for connection in self._opened:
            connection.close()
        self._opened.clear()
