"""Transports between A and F by name; a transport's module, and what it needs, is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ffn_faas.errors import UsageError

if TYPE_CHECKING:
    from ffn_faas.connectors.base import FFNConnector

_TRANSPORTS: Mapping[str, tuple[str, str]] = {
    "shm": ("ffn_faas.connectors.shm", "ShmConnector"),
}

TRANSPORT_NAMES = tuple(_TRANSPORTS)


def create_connector(transport: str) -> FFNConnector:
    """F's side of ``transport``, one of TRANSPORT_NAMES. Raises UsageError for another name, NativeMissing."""
    if transport not in _TRANSPORTS:
        raise UsageError(f"transport {transport!r} is unknown", remedy="known: " + ", ".join(_TRANSPORTS))
    module, attribute = _TRANSPORTS[transport]
    connector: FFNConnector = getattr(importlib.import_module(module), attribute)()
    return connector
