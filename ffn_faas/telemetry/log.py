"""Log lines: one per event that matters, prefixed with the F rank, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
import time

from ffn_faas.config import World


class _TextFormatter(logging.Formatter):
    def __init__(self, prefix: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d {prefix} %(levelname)s %(message)s", datefmt="%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._common = {"ffn_rank": rank, "world_size": size}

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._common,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(world: World, *, as_json: bool) -> None:
    """Send this package's log lines to stderr with the prefix ``[F<rank>/<world>]``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter(world.rank, world.size) if as_json else _TextFormatter(f"[F{world.rank}/{world.size}]")
    )
    logger = logging.getLogger("ffn_faas")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
