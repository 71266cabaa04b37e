"""The end of a process in which a native call waits for ever: no teardown, which could free what it still uses."""

from __future__ import annotations

import logging
import os
import sys


def end_process(code: int, why: str) -> None:
    """Flush, say why, end now with ``code``. Never returns."""
    logging.getLogger(__name__).critical("%s", why)
    logging.shutdown()
    print(why, file=sys.stderr, flush=True)
    os._exit(code)
