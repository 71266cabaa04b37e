"""Events from any thread to one coroutine."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Made inside the coroutine that reads it. ``put`` is safe from any thread, also after the loop has closed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[T] = asyncio.Queue()

    def put(self, event: T) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def get(self) -> T:
        return await self._queue.get()
