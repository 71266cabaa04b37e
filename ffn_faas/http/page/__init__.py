"""The page at ``/``: the files of this folder, and ``/node``, which asks every F rank of this node."""

from __future__ import annotations

import json
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

from fastapi import APIRouter, HTTPException, Response

from ffn_faas.config import ServeConfig
from ffn_faas.telemetry.memory import process_memory

FOLDER = Path(__file__).parent
MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
ANSWER_TIMEOUT_S = 2.0


def page_routes(config: ServeConfig) -> APIRouter:
    """Routes of the page of one F rank; local rank 0 shows its whole node."""
    router = APIRouter()
    assets = {path.name: path for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}

    def file(name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, f"the page has no file {name}")
        path = assets[name]
        return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)

    @router.get("/", include_in_schema=False)
    def index() -> Response:
        return file("index.html")

    @router.get("/page/{name}", include_in_schema=False)
    def asset(name: str) -> Response:
        return file(name)

    @router.get("/node")
    def node(experts: bool = False) -> dict[str, Any]:
        """/status and memory of every F rank of this node (of this rank alone, if it is not local rank 0)."""
        return {"ranks": node_status(config, experts=experts)}

    return router


def node_status(config: ServeConfig, *, experts: bool) -> list[dict[str, Any]]:
    """By rank; one that does not answer is ``{"rank", "unreachable"}``. Blocks for a few seconds at most."""
    world = config.world
    ranks = list(world.local_ranks) if world.local_rank == 0 else [world.rank]
    with ThreadPoolExecutor(max_workers=len(ranks)) as pool:
        return list(pool.map(lambda rank: _rank(config, rank, experts=experts), ranks))


def _rank(config: ServeConfig, rank: int, *, experts: bool) -> dict[str, Any]:
    port = config.port + rank - config.world.local_ranks.start
    query = f"?experts={int(experts)}"
    try:
        if rank == config.world.rank:
            return _ask(config, port, f"/status{query}") | {"memory": process_memory()}
        other: dict[str, Any] = _ask(config, port, f"/node{query}")["ranks"][0]
    except (OSError, ValueError) as error:
        return {"rank": rank, "unreachable": f"port {port} does not answer: {getattr(error, 'reason', error)}"}
    return other


def _ask(config: ServeConfig, port: int, path: str) -> dict[str, Any]:
    host = "127.0.0.1" if config.binds_all_addresses else config.host
    host = f"[{host}]" if ":" in host else host
    context = _context(config)
    url = f"{'http' if context is None else 'https'}://{host}:{port}{path}"
    # Addresses of this node only, and past any proxy that the environment names.
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    with opener.open(url, timeout=ANSWER_TIMEOUT_S) as answer:
        body: dict[str, Any] = json.load(answer)
    return body


def _context(config: ServeConfig) -> ssl.SSLContext | None:
    """Ranks of a node show each other the very certificate that they serve with, under whatever address; else None."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(cafile=config.ssl_certfile)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
