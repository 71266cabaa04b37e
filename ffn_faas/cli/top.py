"""``top``: what the page shows, in a terminal."""

from __future__ import annotations

import argparse
import json
import shutil
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

from ffn_faas import config, env
from ffn_faas.credentials import Credentials
from ffn_faas.errors import ResourceError, UsageError
from ffn_faas.telemetry.rates import Rates
from ffn_faas.telemetry.terminal import Look, draw

EPILOG = """\
examples:
  python -m ffn_faas top
  python -m ffn_faas top http://node7:8100 --interval 5
  python -m ffn_faas top --once --json

Ctrl-C ends it. exit codes with --once: 0 every rank is ready, 1 not every one, 6 nobody answers."""
ENTER, LEAVE, HOME, REST = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[J"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas top",
        description="Watch a running F: phases, step times, sessions, tokens per expert, memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    default = f"http://127.0.0.1:{config.DEFAULT_PORT}"
    add("url", nargs="?", default=default, metavar="URL", help="management address of local rank 0 (%(default)s)")
    add("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (%(default)s)")
    add("--ssl-ca-certs", metavar="FILE", help="https: what F's certificate is checked against (the system's)")
    add("--once", action="store_true", help="print one look and end")
    add("--json", action="store_true", help="with --once: what F said, as JSON")
    return parser


def run(argv: Sequence[str]) -> int:
    """Look until interrupted, or once; returns the exit code."""
    args = _parser().parse_args(argv)
    if not 0.1 <= args.interval < float("inf"):
        raise UsageError(f"--interval is {args.interval}, at least 0.1 s is needed")
    url = args.url if "://" in args.url else f"http://{args.url}"
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{args.url} is no http address", remedy="such as http://127.0.0.1:8100")
    context = Credentials(tls=True, ca_file=args.ssl_ca_certs).ssl_context()
    if args.once:
        return _once(lambda: _ask(url, context), args.interval, as_json=args.json)
    _watch(lambda: _ask(url, context), args.interval, sys.stdout)
    return 0


def _once(ask: Callable[[], list[dict[str, Any]]], interval_s: float, *, as_json: bool) -> int:
    ranks = ask()
    if as_json:
        print(json.dumps({"ranks": ranks}))
    else:
        rates = {rank["rank"]: Rates() for rank in ranks}
        _add(rates, ranks)
        time.sleep(interval_s)
        _add(rates, ranks := ask())
        print("\n".join(draw(_look(ranks, rates), *_size(), color=False)))
    return 0 if all(rank.get("phase") == "ready" for rank in ranks) else 1


def _watch(ask: Callable[[], list[dict[str, Any]]], interval_s: float, out: TextIO) -> None:
    """Draw on the terminal's other screen until Ctrl-C; what was on the first one comes back."""
    rates: dict[int, Rates] = {}
    ranks: list[dict[str, Any]] = []
    color = out.isatty() and not env.no_color()
    out.write(ENTER)
    try:
        while True:
            problem = ""
            try:
                ranks = ask()
                _add(rates, ranks)
            except ResourceError as error:
                problem = error.message
            lines = draw(_look(ranks, rates, problem), *_size(), color=color)
            out.write(HOME + "\n".join(f"{line}\x1b[K" for line in lines) + REST)
            out.flush()
            time.sleep(interval_s)
    except KeyboardInterrupt:
        pass
    finally:
        out.write(LEAVE)
        out.flush()


def _add(rates: dict[int, Rates], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        rates.setdefault(rank["rank"], Rates()).add(rank)


def _look(ranks: list[dict[str, Any]], rates: dict[int, Rates], problem: str = "") -> Look:
    return Look(ranks, {number: of_rank.now() for number, of_rank in rates.items()}, problem)


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size((100, 40))
    return size.columns, size.lines


def _ask(url: str, context: ssl.SSLContext | None) -> list[dict[str, Any]]:
    """Every rank of the node. Raises ResourceError when nobody answers."""
    try:
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        with opener.open(f"{url.rstrip('/')}/node?experts=1", timeout=5) as answer:
            ranks: list[dict[str, Any]] = json.load(answer)["ranks"]
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "reason", error)
        raise ResourceError(
            f"{url} does not answer as F does: {reason}", remedy="start F, or name the address of its local rank 0"
        ) from None
    return ranks
