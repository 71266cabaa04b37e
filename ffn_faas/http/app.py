"""Routes of the management port."""

from __future__ import annotations

from fastapi import FastAPI, Response, WebSocket

from ffn_faas import __version__
from ffn_faas.http import frames
from ffn_faas.http.access import REFUSALS, TokenGuard
from ffn_faas.http.attach import serve_attention
from ffn_faas.http.page import page_routes
from ffn_faas.http.profile import profile_routes
from ffn_faas.http.reports import PhaseReport, StatusReport, StopReport, phase_report, status_report
from ffn_faas.http.world import serve_member
from ffn_faas.service.lifecycle import Phase
from ffn_faas.service.state import ServiceState
from ffn_faas.service.world import WorldHub
from ffn_faas.telemetry.metrics import exposition

LIVE_PATHS = ("/live", "/health", "/v2/health/live")
READY_PATHS = ("/ready", "/v2/health/ready")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(state: ServiceState) -> FastAPI:
    """The HTTP interface of one F rank; handlers only read ``state`` or ask it to stop."""
    app = FastAPI(title="ffn_faas", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(page_routes(state.config))
    app.include_router(profile_routes(state))
    app.add_middleware(TokenGuard, token=state.config.token)

    async def live(response: Response) -> PhaseReport:
        """200 unless this rank has failed or a step is stuck; idle is alive."""
        if state.lifecycle.phase is Phase.FAILED or state.is_stuck:
            response.status_code = 503
        return phase_report(state)

    async def ready(response: Response) -> PhaseReport:
        """200 only when this rank (local rank 0: every rank of its node) can serve."""
        if not state.world.node_is_ready():
            response.status_code = 503
        return phase_report(state)

    for handler, paths, unless in (
        (live, LIVE_PATHS, "it has failed, or a step is stuck"),
        (ready, READY_PATHS, "it cannot serve (yet, or any more)"),
    ):
        for path in paths:
            app.add_api_route(
                path,
                handler,
                methods=["GET"],
                response_model_exclude_none=True,
                responses={503: {"model": PhaseReport, "description": f"{unless}: phase and reason say why"}},
            )

    @app.get("/status", response_model_exclude_none=True)
    async def status(experts: bool = False) -> StatusReport:
        """Phases with their seconds, sessions, steps, model and versions; ``experts=1`` adds rows by expert."""
        return status_report(state, experts=experts)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {METRICS_TYPE: {}}}})
    async def metrics() -> Response:
        """Prometheus text; docs/operations.md lists the names."""
        return Response(exposition(state), media_type=METRICS_TYPE)

    @app.post("/stop", status_code=202, responses=REFUSALS)
    async def stop() -> StopReport:
        """Stop the whole F world, by the same path as SIGTERM. Idempotent."""
        state.stop.request("POST /stop")
        return StopReport(stopping=state.stop.reason)

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
