"""/v1/world on F rank 0: one WebSocket per other F rank."""

from __future__ import annotations

import asyncio

from fastapi import WebSocket

from ffn_faas.http import frames
from ffn_faas.http.mailbox import Mailbox
from ffn_faas.protocol.messages import AnyMessage, Message, WorldDrained, WorldJoin, WorldPhase, WorldStop
from ffn_faas.service.world import WorldHub


async def serve_member(socket: WebSocket, hub: WorldHub) -> None:
    """Join a rank to the world, pass messages both ways, and report its loss."""
    await socket.accept()
    join = await frames.first(socket)
    if join is None:
        return
    if not isinstance(join, WorldJoin):
        await frames.refuse(socket, f"first message: world_join was expected, got {join.type}")
        return
    disagreement = hub.refusal(join)
    if disagreement is not None:
        await frames.refuse(socket, str(disagreement))
        # A launch that disagrees fails as a whole; a world that is complete has nothing to do with who comes later.
        if not hub.formed.is_set():
            hub.stop.request(str(disagreement), disagreement)
        return
    outgoing: Mailbox[Message] = Mailbox()
    incoming: Mailbox[AnyMessage | None] = Mailbox()
    hub.join(join, outgoing.put)
    tasks = [
        asyncio.create_task(_forward(socket, outgoing)),
        asyncio.create_task(frames.pump(socket, incoming.put)),
    ]
    try:
        while (message := await incoming.get()) is not None:
            if isinstance(message, WorldPhase | WorldStop | WorldDrained):
                hub.heard(join.rank, message)
    finally:
        for task in tasks:
            task.cancel()
    hub.gone(join.rank)


async def _forward(socket: WebSocket, outgoing: Mailbox[Message]) -> None:
    while await frames.send(socket, await outgoing.get()):
        pass
