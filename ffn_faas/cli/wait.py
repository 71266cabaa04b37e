"""``wait``: return when every F rank has come far enough for Attention to start."""

from __future__ import annotations

import argparse
import http.client
import ssl
import sys
import time
from collections.abc import Sequence
from typing import Any

from ffn_faas.cli.management import add_address, add_credentials, credentials
from ffn_faas.credentials import Credentials
from ffn_faas.demo import http_client
from ffn_faas.errors import Stuck, UsageError

FAR_ENOUGH = {"live": (), "pairing": ("pairing", "ready"), "ready": ("ready",)}
"""Backends that pair with Attention before they are ready wait for it in phase pairing; live: F answers /live."""
POLL_S = 1.0
EPILOG = """\
examples:
  python -m ffn_faas wait && vllm serve MODEL --load-format ffn_faas --additional-config "$AFD"
  python -m ffn_faas wait --host ffn-0.ffn --port 8100 --timeout 1800
  python -m ffn_faas wait --host ffn-0.ffn --ssl-ca-certs ca.pem

exit codes: 0 every F rank is that far, 2 usage, 5 not within the time."""


def run(argv: Sequence[str]) -> int:
    """Poll F rank 0 and, by the addresses it lists, all others. Raises Stuck after ``--timeout``."""
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas wait",
        description=(__doc__ or "").split(": ")[1],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_address(parser)
    add_credentials(parser)
    parser.add_argument("--phase", default="ready", choices=sorted(FAR_ENOUGH), help="how far (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds (%(default)s)")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.timeout
    said, shown = "", credentials(args)
    while missing := _missing(args.host, args.port, FAR_ENOUGH[args.phase], shown):
        if missing != said:
            print(f"ffn_faas: waiting for F ({args.phase}): {missing}", file=sys.stderr, flush=True)
            said = missing
        if time.monotonic() > end:
            raise Stuck(f"F is not {args.phase} after {args.timeout:.0f} s: {missing}", remedy="see F's log")
        time.sleep(POLL_S)
    return 0


def _missing(host: str, port: int, phases: tuple[str, ...], shown: Credentials) -> str:
    """What is not there yet; "" when nothing is."""
    status = _ask(host, port, "/status" if phases else "/live", shown)
    if status is None:
        return f"{host}:{port} does not answer"
    if not phases:
        return ""
    for rank, listed in enumerate(status["addresses"]):
        if not listed:
            return f"F rank {rank} has not joined"
        where, _, rank_port = listed.rpartition(":")
        state = _ask(where.strip("[]"), int(rank_port), "/status", shown) if rank else status
        if state is None:
            return f"F rank {rank} ({listed}) does not answer"
        if state["phase"] not in phases:
            return f"F rank {rank} is {state['phase']}"
    return ""


def _ask(host: str, port: int, path: str, shown: Credentials) -> Any:
    """The body of an answer of 200, None for anything else. Raises UsageError when no certificate can ever fit."""
    try:
        status, body = http_client.request(port, "GET", path, host=host, credentials=shown)
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"the certificate of {host}:{port} is not accepted: {error.verify_message}",
            remedy="--ssl-ca-certs with F's authorities; --host with a name that the certificate holds",
        ) from None
    except (OSError, http.client.HTTPException):
        return None
    return body if status == 200 and isinstance(body, dict) else None
