"""Bodies of /live, /ready, /status and /stop, as OpenAPI describes them; and how they are made."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from ffn_faas import __version__
from ffn_faas.connectors.base import Distribution
from ffn_faas.protocol import PROTOCOL_VERSION
from ffn_faas.protocol.messages import Fingerprint
from ffn_faas.protocol.topology import expert_range
from ffn_faas.service.sessions import Session
from ffn_faas.service.state import ServiceState
from ffn_faas.telemetry.expert_load import imbalance_ratio, top

TOP = 10


class Report(BaseModel):
    """OpenAPI shows what stands below a field."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class PhaseReport(Report):
    """Where an F rank stands."""

    phase: str
    """starting, loading, pairing, capturing, ready, draining, stopped or failed."""
    progress: float = Field(ge=0, le=1)
    """Of the phase."""
    rank: int
    ranks: dict[str, str]
    """Phase of every F rank of this node."""
    reason: str | None = None
    """Why it stops, has failed or is stuck."""


class SessionReport(Report):
    """One attached Attention instance."""

    session: str
    instance: str
    capacity: int
    stages: int
    num_attention_ranks: int
    window_bytes: int
    attention_ranks: dict[str, str]
    """The peer's program, by A rank."""


class BusyExpert(Report):
    """An expert (global number) of a MoE layer and the rows it has computed."""

    layer: int
    expert: int
    rows: int


class StatusReport(PhaseReport):
    """All there is to know of an F rank."""

    world_size: int
    addresses: list[str]
    phase_seconds: dict[str, float]
    time_to_ready_s: float | None
    version: str
    protocol_version: int
    backend: str
    ops: str | None = None
    """cpu-twin: a stand-in for the backend's operators; absent where there is none to choose."""
    moe_kernel: str
    model: str
    fingerprint: Fingerprint
    experts_per_rank: list[int]
    weights_bytes: int
    window_bytes: int
    merge_bytes: int
    steps: dict[str, float]
    step_seconds: dict[str, Distribution]
    """Time of steps, by part: wait, compute, send."""
    posts_per_item: Distribution | None = None
    busiest_experts: list[BusyExpert]
    expert_imbalance_ratio: float
    sessions: list[SessionReport]
    expert_rows: list[list[int]] | None = None
    """With ``?experts=1``: rows computed by MoE layer and local expert of this rank; absent where not counted."""


class StopReport(Report):
    """The stop that is under way."""

    stopping: str
    """Who asked for it first."""


def phase_report(state: ServiceState) -> PhaseReport:
    """Made from published values only; never waits for the step."""
    snapshot = state.lifecycle.snapshot()
    return PhaseReport(
        phase=snapshot.phase.value,
        progress=round(min(snapshot.progress, 1.0), 4),
        rank=state.config.world.rank,
        ranks={str(rank): state.world.phases[rank] for rank in state.config.world.local_ranks},
        reason=state.stop.reason or snapshot.reason or state.stuck_reason or None,
    )


def status_report(state: ServiceState, *, experts: bool) -> StatusReport:
    """As ``phase_report``; ``experts`` adds the whole table."""
    snapshot, world, connector = state.lifecycle.snapshot(), state.config.world, state.connector
    counted = connector.expert_rows() if connector is not None else None
    rows = counted or []
    first = expert_range(state.spec.num_experts, world.size, world.rank).start
    return StatusReport(
        **phase_report(state).model_dump(),
        world_size=world.size,
        addresses=state.world.addresses,
        phase_seconds=snapshot.seconds,
        time_to_ready_s=snapshot.time_to_ready_s,
        version=__version__,
        protocol_version=PROTOCOL_VERSION,
        backend=state.config.backend,
        ops=state.operators or None,
        moe_kernel=state.moe_kernel,
        model=state.config.model,
        fingerprint=state.offer.fingerprint,
        experts_per_rank=state.experts_per_rank,
        weights_bytes=state.weight_bytes,
        window_bytes=state.sessions.window_bytes,
        merge_bytes=state.sessions.shared_bytes,
        steps=connector.statistics() if connector is not None else {},
        step_seconds=connector.step_seconds() if connector is not None else {},
        posts_per_item=connector.posts_per_item() if connector is not None else None,
        busiest_experts=[
            BusyExpert(layer=layer, expert=first + expert, rows=count) for count, layer, expert in top(rows, TOP)
        ],
        expert_imbalance_ratio=imbalance_ratio(rows),
        sessions=[_session_report(session) for session in state.sessions.snapshot()],
        expert_rows=counted if experts else None,
    )


def _session_report(session: Session) -> SessionReport:
    links = list(session.links.items())
    return SessionReport(
        session=session.id,
        instance=session.instance,
        capacity=session.capacity,
        stages=session.stages,
        num_attention_ranks=session.num_attention_ranks,
        window_bytes=sum(link.window_bytes for _, link in links),
        attention_ranks={str(rank): link.peer for rank, link in links if link.attached},
    )
