"""What a client of the management port shows and checks: F's token, and F's certificate where F serves TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from ffn_faas.errors import UsageError

MAX_TOKEN = 4096


@dataclass(frozen=True)
class Credentials:
    """``ca_file``: certificates (PEM) that F's is checked against; None: those of this system."""

    token: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: str | None = None

    @property
    def scheme(self) -> str:
        return "wss" if self.tls else "ws"

    def headers(self) -> dict[str, str]:
        """Request headers that show the token."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def ssl_context(self) -> ssl.SSLContext | None:
        """None without TLS. Raises UsageError when ``ca_file`` cannot be read."""
        if not self.tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:  # ssl.SSLError is one
            raise UsageError(f"certificates {self.ca_file} cannot be used: {error}") from None


NOTHING = Credentials()


def read_token(path: str) -> str:
    """The token in a file, without the white space around it. Raises UsageError."""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token file {path} cannot be read: {error}") from None
    return checked_token(token, f"token file {path}")


def checked_token(token: str, source: str) -> str:
    """``token`` if it can stand in a header. Raises UsageError naming ``source``, never the token."""
    if not token or len(token) > MAX_TOKEN or not all("!" <= character <= "~" for character in token):
        raise UsageError(
            f"{source} holds no usable token", remedy="printable ASCII without spaces, such as `openssl rand -hex 32`"
        )
    return token
