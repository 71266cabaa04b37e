"""What A and F agree on: messages, topology and window layout. Pure: nothing here does I/O."""

PROTOCOL_VERSION = 1
"""Raised whenever a message or the window layout changes meaning; both sides must hold the same number."""
