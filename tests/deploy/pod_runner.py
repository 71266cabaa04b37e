"""A runner of pods as a process, ``deploy.local`` or ``deploy.launch``, and the changes that it has told of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Runner:
    """A ``python -m ffn_faas.deploy.MODULE`` that runs, and what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def times(self, pod: str, event: str) -> list[float]:
        """Seconds into the run at which the event came."""
        return [float(line["s"]) for line in self.lines[1:] if line["pod"] == pod and line["event"] == event]

    def at(self, pod: str, event: str, number: int = 1, seconds: float = 400) -> float:
        """As ``times``, the ``number``th of them; waits for it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if len(times := self.times(pod, event)) >= number:
                return times[number - 1]
            time.sleep(0.05)
        raise AssertionError(f"{pod} never said {event!r}: {self.lines}")

    def address(self, pod: str) -> str:
        return str(self.lines[0]["addresses"][pod])

    def finish(self, number: int = signal.SIGTERM) -> int:
        """Signal it; its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(180)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def running(module: str, arguments: list[str], logs: Path, environment: Mapping[str, str]) -> Iterator[Runner]:
    """Leaves nothing behind; prints the pods' output when the block fails."""
    command = [sys.executable, "-m", f"ffn_faas.deploy.{module}", *arguments, "--logs", str(logs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    runner = Runner(process)
    try:
        yield runner
    except BaseException:
        for log in sorted(logs.iterdir()):
            print(f"== {log.name}\n{log.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        if process.poll() is None:
            runner.finish()
