"""How an F rank ends when it can no longer end by itself, and what it leaves for whoever looks afterwards.

Every end is bounded: once a stop is requested, a watchdog outside the interpreter ends the process non-zero when its
budget is over, whatever a native call is doing. The exit record, one JSON file per rank, says how the rank ended, also
after a crash; torchelastic's error file gets the reason in its own format.
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ffn_faas import env, native
from ffn_faas.config import ServeConfig
from ffn_faas.errors import ResourceError, Stuck
from ffn_faas.service.stop import StopRequest

TEARDOWN_S = 8.0
"""After the drain: telling peers, releasing memory, HTTP."""
FAILURE_BUDGET_S = 4.0
"""After a failure there is nothing to drain; the rest of the world waits for this rank to go."""


class LastWords:
    """Made at start; ``ended`` at the end. In between it follows the stop request."""

    def __init__(self, config: ServeConfig, stop: StopRequest) -> None:
        self._config = config
        self._stop = stop
        self._began, self._deadline = 0.0, float("inf")
        self._native = native.load()
        self._path = Path(config.exit_record, f"ffn-rank-{config.world.rank}.json") if config.exit_record else None
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._write(None, "running")
            except OSError as error:
                raise ResourceError(f"--exit-record {config.exit_record} cannot be written: {error}") from None
            self._native.record_crashes(str(self._path), self._record(None, "a fatal signal: number @@"))
        faulthandler.enable()
        stop.on_request(self._bound)

    def ended(self, exit_code: int, reason: str) -> None:
        """The orderly end; the watchdog stays armed until the process is gone."""
        with suppress(OSError):
            self._write(exit_code, reason)
        elastic = env.torchelastic_error_file()
        if exit_code and elastic is not None:
            with suppress(OSError):
                Path(elastic).write_text(_torchelastic_error(reason))

    def bound_signals(self, from_fd: int, to_fd: int) -> None:
        """A signal bounds the end even while a native call holds the interpreter lock; see ``stop_on_signals``."""
        budget = self._config.drain_timeout_s + TEARDOWN_S + 1.0
        text = f"a signal asked for a stop; the end took longer than {budget:.0f} s and was forced"
        files = self._files(Stuck.exit_code, text)
        self._native.bound_signals(from_fd, to_fd, budget, Stuck.exit_code, f"ffn_faas: {text}\n", files)

    def _bound(self) -> None:
        error, reason = self._stop.error, self._stop.reason
        budget = FAILURE_BUDGET_S if error else self._config.drain_timeout_s + TEARDOWN_S
        budget = min(budget, self._stop.limit_s or budget)
        # Called again when a stop turns into a failure or has to hurry: that never buys time.
        now = time.monotonic()
        self._began = self._began or now
        self._deadline = min(self._deadline, now + budget)
        budget = self._deadline - now
        code = error.exit_code if error else Stuck.exit_code
        text = f"{reason}; the end took longer than {self._deadline - self._began:.0f} s and was forced"
        # Python's stacks half a second before the end, from a thread that needs no interpreter lock.
        faulthandler.dump_traceback_later(max(0.1, budget - 0.5))
        self._native.arm_watchdog(max(0.0, budget), code, f"ffn_faas: {text}\n", self._files(code, text))

    def _files(self, exit_code: int, reason: str) -> list[tuple[str, str]]:
        """What a forced end leaves: (path, content) of each."""
        files = [] if self._path is None else [(str(self._path), self._record(exit_code, reason))]
        elastic = env.torchelastic_error_file()
        return files if elastic is None else [*files, (elastic, _torchelastic_error(reason))]

    def _write(self, exit_code: int | None, reason: str) -> None:
        if self._path is not None:
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(self._record(exit_code, reason))
            temporary.replace(self._path)

    def _record(self, exit_code: int | None, reason: str) -> str:
        world = self._config.world
        content = {"rank": world.rank, "world_size": world.size, "pid": os.getpid(), "time": time.time()}
        return json.dumps(content | {"exit_code": exit_code, "reason": reason[:1000]}) + "\n"


def _torchelastic_error(reason: str) -> str:
    message = {"message": reason, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
    return json.dumps({"message": message})
