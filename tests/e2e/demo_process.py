"""Runs ``python -m ffn_faas demo`` and sees what is left of it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 240.0


def adopt_orphans() -> None:
    """Whatever outlives a demo becomes a child of this process (PR_SET_CHILD_SUBREAPER), where it can be seen."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


class Running:
    """A demo that runs, its stderr in a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Until stderr holds ``text``."""
        poll_until(lambda: text in self.log() or self.process.poll() is not None, PATIENCE_S)
        assert text in self.log(), self.log()

    def wait_for_process(self, *words: str) -> None:
        """Until ``find`` finds one: the last that a demo starts is vLLM's worker."""
        poll_until(lambda: bool(self._matching(*words)) or self.process.poll() is not None, PATIENCE_S)
        self.find(*words)

    def find(self, *words: str) -> psutil.Process:
        """The deepest process of the tree whose command line holds all words."""
        matching = self._matching(*words)
        assert matching, f"no process with {words}"
        return matching[-1]

    def _matching(self, *words: str) -> list[psutil.Process]:
        matching = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if all(word in command for word in words):
                    matching.append(process)
        return matching


class Demos:
    """Starts demos that share a work directory, so that each vLLM is started as seldom as can be."""

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir
        self._kept: dict[tuple[str, ...], dict[str, Any]] = {}

    @staticmethod
    def vllm_is_here() -> bool:
        return importlib.util.find_spec("vllm") is not None

    def figures(self, *flags: str) -> dict[str, Any]:
        """What ``demo --json`` prints; the same flags run once per session."""
        if flags not in self._kept:
            kept_stock = self._work_dir / f"stock{'-compiled' if '--compiled' in flags else ''}.json"
            with self.running("--json", "--stock-answers", str(kept_stock), *flags) as demo:
                output, _ = demo.process.communicate(timeout=800)
                assert demo.process.returncode == 0, demo.log()
            self._kept[flags] = json.loads(output)
        return self._kept[flags]

    @contextlib.contextmanager
    def running(self, *flags: str) -> Iterator[Running]:
        """A demo; at the end nothing may be left of it, neither a process nor an entry in /dev/shm."""
        shared_before = _shared_memory()
        strangers = psutil.Process().children()
        log = self._work_dir / "demo.log"
        command = [sys.executable, "-m", "ffn_faas", "demo", "--work-dir", str(self._work_dir), *flags]
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, cwd=self._work_dir, env=environment(*flags)
            )
        try:
            yield Running(process, log)
            poll_until(lambda: process.poll() is not None, 60)
            assert process.poll() is not None, "the demo has not ended"
            nothing_left = poll_until(lambda: not _running(strangers) and not _left_behind(shared_before), 60)
            assert nothing_left, (_running(strangers), _left_behind(shared_before), log.read_text(errors="replace"))
        finally:
            _kill_everything(process, strangers)


def environment(*flags: str) -> dict[str, str]:
    """An eager vLLM compiles nothing but the ranking of its log-probabilities, for 5 to 10 s a start: not here."""
    return {**os.environ, **({"TORCHDYNAMO_DISABLE": "1"} if "--eager" in flags else {})}


def poll_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll; returns when the condition holds, or false when the time is over."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
    return True


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _left_behind(before: set[str]) -> set[str]:
    """Entries of /dev/shm that are new, and that no living process uses: other tests may run beside this one."""
    new = _shared_memory() - before
    unused = new - _used_by_someone() if new else new
    return unused & _shared_memory()  # what another test removed, and let go of, meanwhile was never left


def _used_by_someone() -> set[str]:
    used = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            used |= {Path(mapped.path).name for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/")}
            used |= {Path(file.path).name for file in process.open_files() if file.path.startswith("/dev/shm/")}
    return used


def _descendants(strangers: list[psutil.Process]) -> list[psutil.Process]:
    """Of this process, but for children that were there before, and theirs."""
    found = []
    for child in psutil.Process().children():
        if child not in strangers:
            with contextlib.suppress(psutil.Error):
                found += [child, *child.children(recursive=True)]
    return found


def _running(strangers: list[psutil.Process]) -> list[str]:
    """Command lines of such descendants that live; adopted dead ones are reaped."""
    _, alive = psutil.wait_procs(_descendants(strangers), timeout=0.01)
    commands = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                commands.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    return commands


def _kill_everything(process: subprocess.Popen[bytes], strangers: list[psutil.Process]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    children = _descendants(strangers)
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()
    process.wait(30)
    psutil.wait_procs(children, timeout=10)
