"""Routes of the management port."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response, WebSocket
from fastapi.responses import JSONResponse

from ffn_faas import __version__
from ffn_faas.http import frames
from ffn_faas.http.attach import serve_attention
from ffn_faas.http.page import page_routes
from ffn_faas.http.world import serve_member
from ffn_faas.protocol import PROTOCOL_VERSION
from ffn_faas.service.lifecycle import Phase
from ffn_faas.service.state import ServiceState
from ffn_faas.service.world import WorldHub
from ffn_faas.telemetry.metrics import exposition


def create_app(state: ServiceState) -> FastAPI:
    """The HTTP interface of one F rank; handlers only read ``state`` or ask it to stop."""
    app = FastAPI(title="ffn_faas", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(page_routes(state.config))

    async def live() -> Response:
        """200 unless this rank has failed or a step is stuck; idle is alive."""
        dead = state.lifecycle.phase is Phase.FAILED or state.is_stuck
        return JSONResponse(_phase(state), status_code=503 if dead else 200)

    async def ready() -> Response:
        """200 only when this rank (local rank 0: every rank of its node) can serve."""
        return JSONResponse(_phase(state), status_code=200 if state.world.node_is_ready() else 503)

    for path in ("/live", "/health", "/v2/health/live"):
        app.add_api_route(path, live, methods=["GET"], include_in_schema=path == "/live")
    for path in ("/ready", "/v2/health/ready"):
        app.add_api_route(path, ready, methods=["GET"], include_in_schema=path == "/ready")

    @app.get("/status")
    async def status() -> dict[str, Any]:
        """Phases with their seconds, sessions, model and versions."""
        return _status(state)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(exposition(state), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/stop", status_code=202)
    async def stop() -> dict[str, str]:
        """Stop the whole F world, by the same path as SIGTERM. Idempotent."""
        state.stop.request("POST /stop")
        return {"stopping": state.stop.reason}

    @app.websocket("/v1/attach")
    async def attach(socket: WebSocket) -> None:
        await serve_attention(socket, state)

    @app.websocket("/v1/world")
    async def world(socket: WebSocket) -> None:
        if isinstance(state.world, WorldHub):
            await serve_member(socket, state.world)
        else:
            await socket.accept()
            await frames.refuse(socket, f"this is F rank {state.config.world.rank}; F ranks join F rank 0")

    return app


def _phase(state: ServiceState) -> dict[str, Any]:
    snapshot = state.lifecycle.snapshot()
    body: dict[str, Any] = {
        "phase": snapshot.phase.value,
        "progress": round(snapshot.progress, 4),
        "rank": state.config.world.rank,
        "ranks": {str(rank): state.world.phases[rank] for rank in state.config.world.local_ranks},
    }
    reason = snapshot.reason or state.stop.reason or state.stuck_reason
    return body | ({"reason": reason} if reason else {})


def _status(state: ServiceState) -> dict[str, Any]:
    snapshot, world = state.lifecycle.snapshot(), state.config.world
    return _phase(state) | {
        "world_size": world.size,
        "addresses": state.world.addresses,
        "phase_seconds": snapshot.seconds,
        "time_to_ready_s": snapshot.time_to_ready_s,
        "version": __version__,
        "protocol_version": PROTOCOL_VERSION,
        "backend": state.config.backend,
        "moe_kernel": state.moe_kernel,
        "model": state.config.model,
        "fingerprint": state.offer.fingerprint.model_dump(),
        "experts_per_rank": state.experts_per_rank,
        "weights_bytes": state.weight_bytes,
        "window_bytes": state.sessions.window_bytes,
        "steps": state.connector.statistics() if state.connector is not None else {},
        "sessions": [
            {
                "session": session.id,
                "instance": session.instance,
                "capacity": session.capacity,
                "stages": session.stages,
                "num_attention_ranks": session.num_attention_ranks,
                "attention_ranks": {str(rank): link.peer for rank, link in session.links.items() if link.attached},
            }
            for session in state.sessions.snapshot()
        ],
    }
