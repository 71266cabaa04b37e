"""Memory of this process and of its host."""

from __future__ import annotations

import psutil


def process_memory() -> dict[str, int]:
    """Bytes: resident memory of this process, the host's in all, and what the host could still give."""
    host = psutil.virtual_memory()
    return {
        "rss_bytes": psutil.Process().memory_info().rss,
        "host_total_bytes": host.total,
        "host_available_bytes": host.available,
    }
