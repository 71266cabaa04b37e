"""``stop``: ask the F world to stop, by POST /stop, and return when the rank that was asked has ended."""

from __future__ import annotations

import argparse
import http.client
import ssl
import time
from collections.abc import Sequence

from ffn_faas.cli.management import add_address, add_credentials, credentials
from ffn_faas.credentials import Credentials
from ffn_faas.demo import http_client
from ffn_faas.errors import Stuck, UsageError

POLL_S = 0.2
ASK_S = 3.0
"""How long one that answers nothing sensible is asked again."""
EPILOG = """\
examples:
  python -m ffn_faas stop
  python -m ffn_faas stop --host ffn-0.ffn --port 8100
  python -m ffn_faas stop --host ffn-0.ffn --token-file token --ssl-ca-certs ca.pem

Where F asks for a token, --token-file or FFN_FAAS_TOKEN names it.
exit codes: 0 F has ended, 2 usage or declined, 5 not within the time."""


def run(argv: Sequence[str]) -> int:
    """0 when F has ended, also when it had before. Raises Stuck after ``--timeout``, UsageError when F declines."""
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas stop",
        description=(__doc__ or "").split(": ")[1],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_address(parser)
    add_credentials(parser)
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds (%(default)s)")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.timeout
    shown = credentials(args)
    if not _asked(args.host, args.port, shown):
        return 0
    while _answers(args.host, args.port, shown):
        if time.monotonic() > end:
            raise Stuck(f"F at {args.host}:{args.port} still answers {args.timeout:.0f} s after it was asked to stop")
        time.sleep(POLL_S)
    return 0


def _asked(host: str, port: int, shown: Credentials) -> bool:
    """False when nobody listens there. Raises UsageError when who does cannot be asked."""
    give_up = time.monotonic() + ASK_S
    while True:
        try:
            status, body = http_client.request(port, "POST", "/stop", host=host, credentials=shown)
            break
        except ConnectionRefusedError:
            return False
        except (OSError, http.client.HTTPException) as error:
            # One that is just ending drops connections as well, and refuses them a moment later.
            if isinstance(error, ssl.SSLError) or time.monotonic() > give_up:
                raise UsageError(
                    f"F at {host}:{port} cannot be asked to stop: {error or type(error).__name__}",
                    remedy="name F rank 0; where F serves TLS, --tls, or --ssl-ca-certs with its authorities",
                ) from None
            time.sleep(POLL_S)
    if status != 202:
        raise UsageError(f"F at {host}:{port} answered POST /stop with HTTP {status}: {body}")
    return True


def _answers(host: str, port: int, shown: Credentials) -> bool:
    try:
        http_client.request(port, "GET", "/live", host=host, timeout_s=2.0, credentials=shown)
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        return True
    return True
