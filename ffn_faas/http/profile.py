"""POST /profile: the times of the next steps as a trace that Perfetto opens."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Body, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from ffn_faas.errors import FfnError
from ffn_faas.http.access import REFUSALS, Refusal
from ffn_faas.service import profiler
from ffn_faas.service.state import ServiceState
from ffn_faas.telemetry.spans import MOST

MAX_TIMEOUT_S = 300.0


class ProfileOrder(BaseModel):
    """What to capture; every field may be left out."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")

    steps: int = Field(256, ge=1, le=MOST)
    """So many steps of this F rank."""
    timeout_s: float = Field(10.0, gt=0, le=MAX_TIMEOUT_S)
    """Or those of so many seconds, if there are fewer."""
    attention: bool = True
    """Also the posts of the Attention ranks that are attached; of several F ranks ask one for them."""


def profile_routes(state: ServiceState) -> APIRouter:
    """The route; one capture at a time."""
    router = APIRouter()

    @router.post("/profile", responses=REFUSALS | {code: {"model": Refusal} for code in (400, 503)})
    async def profile(order: Annotated[ProfileOrder | None, Body()] = None) -> Response:
        """Capture and answer a Chrome trace; save it and open it at ui.perfetto.dev."""
        order = order or ProfileOrder()
        end = time.monotonic() + order.timeout_s
        try:
            captured = await asyncio.to_thread(
                profiler.capture, state, order.steps, lambda: time.monotonic() > end, attention=order.attention
            )
        except FfnError as error:
            return JSONResponse({"reason": str(error)}, status_code=error.http_status)
        return JSONResponse(captured)

    return router
