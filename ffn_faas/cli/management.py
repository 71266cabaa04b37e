"""What commands that ask F share: its address, its token, and TLS; with the defaults that ``serve`` would take."""

from __future__ import annotations

import argparse

from ffn_faas import config, env
from ffn_faas.credentials import Credentials, checked_token, read_token
from ffn_faas.errors import UsageError


def add_address(parser: argparse.ArgumentParser) -> None:
    """``--host`` and ``--port`` of F rank 0."""
    port = env.setting("port") or str(config.DEFAULT_PORT)
    parser.add_argument("--host", default=env.setting("host") or "127.0.0.1", help="of F rank 0 (%(default)s)")
    parser.add_argument("--port", type=_port, default=port, help="management port of F rank 0 (%(default)s)")


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """``--token-file``, ``--tls`` and ``--ssl-ca-certs``; where F's own environment says TLS, TLS is the default."""
    add = parser.add_argument
    add("--token-file", default=env.setting("token-file"), metavar="FILE", help="F's token; also FFN_FAAS_TOKEN")
    tls = env.setting("ssl-certfile") is not None
    add("--tls", action="store_true", default=tls, help="F serves TLS; also FFN_FAAS_SSL_CERTFILE or --ssl-ca-certs")
    authorities = env.setting("ssl-ca-certs")
    add("--ssl-ca-certs", default=authorities, metavar="FILE", help="what F's certificate is checked against, PEM")


def credentials(args: argparse.Namespace) -> Credentials:
    """From what ``add_credentials`` added; a file wins over FFN_FAAS_TOKEN. Raises UsageError."""
    token = env.token()
    if args.token_file is not None:
        token = read_token(args.token_file)
    elif token is not None:
        token = checked_token(token, "FFN_FAAS_TOKEN")
    shown = Credentials(token, args.tls or args.ssl_ca_certs is not None, args.ssl_ca_certs)
    shown.ssl_context()  # a file that cannot be read is said now, not taken for an F that does not answer
    return shown


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise UsageError(f"{text!r} is not a port")
    return int(text)
