"""``profile``: the next steps of a running F and of its Attention, as one trace for Perfetto."""

from __future__ import annotations

import argparse
import http.client
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ffn_faas import config
from ffn_faas.cli.management import add_credentials, credentials
from ffn_faas.credentials import Credentials
from ffn_faas.demo import http_client
from ffn_faas.errors import ResourceError, UsageError
from ffn_faas.service.profiler import write
from ffn_faas.telemetry import trace
from ffn_faas.telemetry.spans import MOST

EPILOG = """\
examples:
  python -m ffn_faas profile
  python -m ffn_faas profile http://node7:8100 --steps 1000 --output long.trace.json

Open the file at https://ui.perfetto.dev (it stays in the browser), or in chrome://tracing. A row for each F rank:
wait, merge, sort, experts, combine of every step; a row for each Attention rank and stage: dispatch, meanwhile (what
the model does in between, such as shared experts), wait, sum of every post. All count on one clock; between hosts that
is as good as their clocks are synchronized.

exit codes: 0 written, 2 usage or declined, 6 F does not answer or has no time."""
SLACK_S = 30.0


def run(argv: Sequence[str]) -> int:
    """Ask every F rank at once, and rank 0 for the Attention ranks as well. Raises ResourceError, UsageError."""
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas profile",
        description="Capture the next steps of every F rank, and the posts of its Attention ranks, as a Chrome trace.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    default = f"http://127.0.0.1:{config.DEFAULT_PORT}"
    add("url", nargs="?", default=default, metavar="URL", help="management address of F rank 0 (%(default)s)")
    add("--steps", type=int, default=256, metavar="N", help=f"steps of each F rank, at most {MOST} (%(default)s)")
    add("--timeout", type=float, default=10.0, metavar="S", help="fewer steps, if they take longer (%(default)s)")
    add("--output", type=Path, default=Path("ffn.trace.json"), metavar="FILE", help="(%(default)s)")
    add_credentials(parser)
    args = parser.parse_args(argv)
    if not 1 <= args.steps <= MOST:
        raise UsageError(f"--steps is {args.steps}, 1 to {MOST} can be kept")
    if not 0 < args.timeout <= 300:
        raise UsageError(f"--timeout is {args.timeout}, more than 0 and at most 300 s are possible")
    url = urlsplit(args.url if "://" in args.url else f"http://{args.url}")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise UsageError(f"{args.url} is no http address", remedy="such as http://127.0.0.1:8100")
    args.tls = args.tls or url.scheme == "https"
    shown, port = credentials(args), url.port or config.DEFAULT_PORT
    status = _ask(url.hostname, port, "GET", "/status", None, 5.0, shown)
    places = [(url.hostname, port), *(_place(address) for address in status["addresses"][1:])]
    order = {"steps": args.steps, "timeout_s": args.timeout}

    def ask(rank: int) -> Any:
        body = {**order, "attention": rank == 0}
        return _ask(*places[rank], "POST", "/profile", body, args.timeout + SLACK_S, shown)

    with ThreadPoolExecutor(len(places)) as executor:
        captured = trace.merge(list(executor.map(ask, range(len(places)))))
    write(args.output, captured)
    steps, posts = trace.steps(captured), trace.posts(captured)
    print(f"{steps} steps of {len(places)} F rank(s), {posts} posts of Attention: {args.output}")
    if steps:
        print("open it at https://ui.perfetto.dev")
    else:
        print(f"no step came within {args.timeout:g} s: start it while requests run, or just before", file=sys.stderr)
    return 0


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _ask(host: str, port: int, method: str, path: str, body: Any, timeout_s: float, shown: Credentials) -> Any:
    try:
        status, answer = http_client.request(port, method, path, body, timeout_s, host=host, credentials=shown)
    except (OSError, http.client.HTTPException) as error:
        raise ResourceError(
            f"F at {host}:{port} does not answer: {error or type(error).__name__}",
            remedy="name F rank 0; where F serves TLS, https:// and --ssl-ca-certs",
        ) from None
    if status == 200 and isinstance(answer, dict):
        return answer
    reason = answer.get("reason", answer) if isinstance(answer, dict) else answer
    if status == 503:
        raise ResourceError(f"F at {host}:{port} cannot be profiled now: {reason}")
    raise UsageError(f"F at {host}:{port} declined {path} (HTTP {status}): {reason}")
