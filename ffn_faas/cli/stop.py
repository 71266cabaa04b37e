"""``stop``: ask the F world to stop, by POST /stop, and return when the rank that was asked has ended."""

from __future__ import annotations

import argparse
import http.client
import time
from collections.abc import Sequence

from ffn_faas import env
from ffn_faas.cli.wait import address
from ffn_faas.demo import http_client
from ffn_faas.errors import Stuck, UsageError

POLL_S = 0.2
EPILOG = """\
examples:
  python -m ffn_faas stop
  python -m ffn_faas stop --host ffn-0.ffn --port 8100

Where F asks for a token, FFN_FAAS_TOKEN names it.
exit codes: 0 F has ended, 2 usage or declined, 5 not within the time."""


def run(argv: Sequence[str]) -> int:
    """0 when F has ended, also when it had before. Raises Stuck after ``--timeout``, UsageError when F declines."""
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas stop",
        description=(__doc__ or "").split(": ")[1],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    address(parser)
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds (%(default)s)")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.timeout
    if not _asked(args.host, args.port):
        return 0
    while _answers(args.host, args.port):
        if time.monotonic() > end:
            raise Stuck(f"F at {args.host}:{args.port} still answers {args.timeout:.0f} s after it was asked to stop")
        time.sleep(POLL_S)
    return 0


def _asked(host: str, port: int) -> bool:
    try:
        status, body = http_client.request(port, "POST", "/stop", host=host, token=env.token())
    except (OSError, http.client.HTTPException):
        return False
    if status != 202:
        raise UsageError(f"F at {host}:{port} answered POST /stop with HTTP {status}: {body}")
    return True


def _answers(host: str, port: int) -> bool:
    try:
        http_client.request(port, "GET", "/live", host=host, timeout_s=2.0)
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        return True
    return True
