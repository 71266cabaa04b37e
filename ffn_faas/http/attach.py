"""/v1/attach: the session of one A rank on this F rank, from handshake to its end."""

from __future__ import annotations

import asyncio
import logging

from fastapi import WebSocket

from ffn_faas import __version__
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.errors import FfnError
from ffn_faas.http import frames
from ffn_faas.http.mailbox import Mailbox
from ffn_faas.protocol import handshake
from ffn_faas.protocol.messages import (
    AnyMessage,
    Attach,
    Attached,
    Detach,
    Ended,
    Granted,
    Layers,
    LayersAccepted,
    Loaded,
    Profile,
    Profiled,
    Progress,
    Windows,
    WindowsMapped,
)
from ffn_faas.protocol.window import window_layout
from ffn_faas.service.lifecycle import Phase
from ffn_faas.service.sessions import Cause, Ending, Link, Session
from ffn_faas.service.state import ServiceState

log = logging.getLogger(__name__)


class PhaseChanged:
    """F's phase or progress moved."""


LOST = Ending(Cause.CONNECTION_LOST, "its connection closed")
Event = AnyMessage | Ending | PhaseChanged | None


async def serve_attention(socket: WebSocket, state: ServiceState) -> None:
    """Answer an Attach, then keep the session until A detaches or dies, or F ends it."""
    await socket.accept()
    attach = await frames.first(socket)
    if attach is None:
        return
    if not isinstance(attach, Attach):
        await frames.refuse(socket, f"first message: attach was expected, got {attach.type}")
        return
    if state.stop:
        state.sessions.refused("stopping")
        await frames.refuse(socket, f"F is stopping: {state.stop.reason}", final=False)
        return
    while not state.world.formed.is_set():
        if not await frames.send(socket, Progress(phase=Phase.STARTING.value, progress=0.0)):
            return
        await asyncio.sleep(0.2)
    capacity = handshake.granted_capacity(attach, state.offer)
    geometry = state.window_geometry(attach.stages, capacity)
    window_bytes = _window_bytes(attach, geometry)
    for why, reason in (
        ("mismatch", handshake.refusal(attach, state.offer)),
        ("conflict", state.sessions.conflict(attach)),
        ("conflict", state.admit(attach) or _second_of_a_pair(attach, state)),
        ("limit", state.sessions.over_limit(attach, window_bytes)),
    ):
        if reason is not None:
            state.sessions.refused(why)
            await frames.refuse(socket, reason)
            return
    await AttachedRank(socket, state, attach, geometry).serve()


def _second_of_a_pair(attach: Attach, state: ServiceState) -> str | None:
    other = state.sessions.other_instance(attach) if state.offer.cam is not None else None
    return f"npu-async-cam serves one Attention instance; {other} is attached" if other is not None else None


def _window_bytes(attach: Attach, geometry: WindowGeometry) -> int:
    """Transport cam keeps its windows in buffers that the communication library has taken at start."""
    return 0 if attach.transport == "cam" else window_layout(geometry).nbytes


class AttachedRank:
    """One A rank that was granted a place in its instance's session."""

    def __init__(self, socket: WebSocket, state: ServiceState, attach: Attach, geometry: WindowGeometry) -> None:
        self._socket = socket
        self._state = state
        self._attach = attach
        self._geometry = geometry
        self._events: Mailbox[Event] = Mailbox()
        self._link = Link(
            attention_rank=attach.attention_rank,
            peer=attach.peer,
            close=self._events.put,
            window_bytes=_window_bytes(attach, geometry),
            attempt=attach.attempt,
            ask=self._events.put,
        )
        self._owes_spans = False
        self._session: Session = state.sessions.join(attach, geometry.capacity, self._link)
        self._name = f"A rank {attach.attention_rank}/{attach.num_attention_ranks} of instance {attach.instance}"

    async def serve(self) -> None:
        """Run until the session is over, whatever ends it; then free what belongs to this rank."""
        forget = self._state.lifecycle.on_change(lambda: self._events.put(PhaseChanged()))
        reader = asyncio.create_task(frames.pump(self._socket, self._events.put))
        ending = LOST
        try:
            await self._grant()
            await self._phase_changed()
            ending = await self._until_over()
        except FfnError as error:
            ending = Ending(Cause.F_FAILED, str(error))
            await frames.send(self._socket, Ended(reason=ending.reason))
        finally:
            forget()
            reader.cancel()
            self._leave(ending)
        await frames.close(self._socket)

    async def _until_over(self) -> Ending:
        while True:
            event = await self._events.get()
            if event is None:
                return LOST
            if isinstance(event, Detach) and not self._kept_by_connector():
                return Ending(Cause.RETURNING if event.returning else Cause.DETACHED, "it detached")
            if isinstance(event, Ending):
                await frames.send(self._socket, Ended(reason=event.reason, final=event.final))
                return event
            if isinstance(event, Detach):
                continue
            if isinstance(event, PhaseChanged):
                await self._phase_changed()
            elif isinstance(event, Profile):
                self._owes_spans = self._owes_spans or event.posts == 0
                await frames.send(self._socket, event)
            elif isinstance(event, Profiled) and self._owes_spans:
                self._owes_spans, self._link.profiled = False, event
            elif isinstance(event, Layers):
                await self._layers(event)
            elif isinstance(event, Loaded) and self._state.connector is not None:
                self._state.connector.rank_loaded(self._attach.attention_rank)
            elif isinstance(event, WindowsMapped):
                await self._windows_mapped(event)
            else:
                await frames.refuse(self._socket, f"unexpected message {event.type}")
                return Ending(Cause.PROTOCOL_BROKEN, f"it sent {event.type} out of turn")

    def _kept_by_connector(self) -> bool:
        connector = self._state.connector
        return connector is not None and connector.rank_detached(self._attach.attention_rank)

    async def _grant(self) -> None:
        state = self._state
        address = frames.address(self._socket)
        log.info("%s (%s, %s) attaches: capacity %d", self._name, self._attach.peer, address, self._session.capacity)
        granted = Granted(
            session=self._session.id,
            ffn_rank=state.config.world.rank,
            num_ffn_ranks=state.config.world.size,
            addresses=state.world.addresses,
            expert_counts=state.experts_per_rank,
            capacity=self._session.capacity,
            epoch=self._link.epoch,
            software_version=__version__,
            rendezvous_port=state.world.rendezvous_port,
        )
        await frames.send(self._socket, granted)

    async def _phase_changed(self) -> None:
        snapshot = self._state.lifecycle.snapshot()
        if snapshot.phase is not Phase.READY:
            await frames.send(self._socket, Progress(phase=snapshot.phase.value, progress=snapshot.progress))
        elif self._link.window is None:
            await self._offer_windows()

    async def _layers(self, layers: Layers) -> None:
        ours = {name: index for index, name in enumerate(self._state.spec.layers)}
        unknown = [name for name in layers.names if name not in ours]
        if unknown:
            text = f"layers: Attention built {unknown[0]}, F has {', '.join(list(ours)[:3])} ... ({len(ours)} in all)"
            await frames.refuse(self._socket, f"{text}; serve the same model on both sides")
            self._events.put(None)
            return
        await frames.send(self._socket, LayersAccepted(indices=[ours[name] for name in layers.names]))

    async def _offer_windows(self) -> None:
        connector, spec = self._state.connector, self._state.spec
        if connector is None:
            return
        owned = self._state.experts_per_rank[self._state.config.world.rank]
        remote = handshake.transport(self._attach, self._state.offer) == "tcp"
        open_link = connector.open_remote_link if remote else connector.open_link
        self._link.window, offer = await asyncio.to_thread(
            open_link, self._geometry, self._link.epoch, [owned] * len(spec.layers)
        )
        await frames.send(self._socket, Windows(**vars(offer)))

    async def _windows_mapped(self, mapped: WindowsMapped) -> None:
        connector = self._state.connector
        if connector is None or self._link.window is None or self._link.attached:
            return
        if mapped.combine is not None:
            await asyncio.to_thread(connector.accept_reply, self._link.window, mapped.combine)
        await asyncio.to_thread(connector.activate_link, self._link.window)
        self._state.sessions.attached(self._link)
        await frames.send(self._socket, Attached())
        over = handshake.transport(self._attach, self._state.offer)
        log.info("%s attached over %s: session %s", self._name, over, self._session.id)

    def _leave(self, ending: Ending) -> None:
        connector, window = self._state.connector, self._link.window
        if connector is not None and window is not None:
            connector.close_link(window)
        if connector is not None:
            connector.rank_left(self._attach.attention_rank, ending.reason, orderly=ending.cause.is_orderly)
        log.info("%s left: %s", self._name, ending.reason)
        for other in self._state.sessions.leave(self._session, self._link, ending.cause):
            other.close(Ending(Cause.SIBLING_LOST, f"{self._name} is gone ({ending.reason})"))
