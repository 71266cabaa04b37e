"""Child processes of the demo: each in a session of its own, logging to a file, and gone when the demo is gone.

However the demo ends, nothing stays: a child is told to terminate by the kernel when the demo dies, a guardian then
ends what is left of its session, the demo adopts (as subreaper) whatever a dying child leaves behind, and stopping
reaches every process of a child's tree.
Linux only. Start children from the main thread: the kernel ties them to the thread that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ffn_faas.demo.guardian import is_tracker, of_sessions
from ffn_faas.demo.interrupts import uninterrupted
from ffn_faas.demo.shared_memory import mapped_by, remove_unused
from ffn_faas.errors import FfnError

if TYPE_CHECKING:
    from typing_extensions import Self

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ERROR = re.compile(r"\b(ERROR|FATAL|[A-Z]\w*Error:|error:)")
_LIBC = ctypes.CDLL(None, use_errno=True)


class ChildFailed(FfnError):
    """A process that the demo needs has ended, or did not do its part in time."""

    exit_code = 1


class Child:
    """One started command; ``log_path`` receives its stdout and stderr."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self.started_at = time.monotonic()
        self._memory: set[Path] = set()
        with log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509 - no other thread holds a lock when children start
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        """None while it runs; -N when signal N ended it."""
        return self._popen.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the process itself, if it still runs."""
        if self._popen.poll() is None:
            self.note_memory()
            self._popen.send_signal(number)

    def note_memory(self) -> None:
        """Remember what the tree has in /dev/shm now, for ``forget_memory``."""
        self._memory |= mapped_by(self.tree())

    def forget_memory(self) -> None:
        """Once the tree has ended: unlink what it left of that."""
        remove_unused(self._memory)

    def kill(self) -> None:
        """SIGKILL every process of the tree at once; does not wait, so that ``exit_code`` tells the truth."""
        self.note_memory()
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def tree(self) -> list[psutil.Process]:
        """The process, its descendants and what else lives in its session; itself first."""
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.pid)
            found = {process.pid: process for process in (root, *root.children(recursive=True))}
        for process in of_sessions({self.pid}):
            found.setdefault(process.pid, process)
        return list(found.values())

    def memory(self) -> tuple[int, int]:
        """(RSS, PSS) of the tree in bytes; PSS counts a shared page once, RSS once per process."""
        rss = pss = 0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                info = process.memory_full_info()
                rss, pss = rss + info.rss, pss + info.pss
        return rss, pss

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 30) -> str:
        """How the log ends, after earlier lines that speak of errors: launchers bury the cause under a summary."""
        everything = self.log_text().splitlines()
        causes = [line for line in everything[:-lines] if _ERROR.search(line)][-10:]
        return "\n".join(f"    {line}" for line in [*causes, *everything[-lines:]])

    def cause(self) -> str:
        """The first line of its log that speaks of an error, cut to 300 characters; "" when none does."""
        found = (line.strip() for line in self.log_text().splitlines() if _ERROR.search(line))
        return next(found, "")[:300]

    def failure(self, what: str) -> ChildFailed:
        """An error that shows how the child's log ends."""
        return ChildFailed(f"{self.name} {what}; its log ({self.log_path}) ends with\n{self.log_tail()}\n")

    def stop(self, terminate: Callable[[], None] | None, deadline_s: float) -> int | None:
        """Ask (``terminate``, else SIGTERM), wait, then end what is left of the tree.

        Returns the exit code, None when the child had to be killed.
        """
        tree = self.tree()
        self._memory |= mapped_by(tree)
        if self._popen.poll() is None:
            (terminate or self._popen.terminate)()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(deadline_s)
        code = self._popen.returncode
        end_all({process.pid: process for process in (*tree, *self.tree())}.values())
        self._popen.wait()
        self.forget_memory()
        return code


class Children:
    """All children of one demo; leaving the context stops all at once, then kills every descendant.

    Processes that descend from this one when it is entered are not of the demo, and stay.
    """

    def __init__(self) -> None:
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        self._strangers = set(psutil.Process().children())
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        heard, self._guarded = os.pipe()
        guardian = [sys.executable, "-m", "ffn_faas.demo.guardian"]
        self._guardian = subprocess.Popen(guardian, stdin=heard, start_new_session=True)
        os.close(heard)
        self._strangers.add(psutil.Process(self._guardian.pid))
        return self

    def __exit__(self, *exc_info: object) -> None:
        with uninterrupted():
            for child in self._children:
                child.signal(signal.SIGTERM)
            for child in reversed(self._children):
                child.stop(lambda: None, deadline_s=10.0)
            self._children.clear()
            end_all(self._descendants())
            os.close(self._guarded)
            self._guardian.wait(30)

    def _descendants(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process().children():
            if child not in self._strangers:
                with contextlib.suppress(psutil.Error):
                    found += [child, *child.children(recursive=True)]
        return found

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> Child:
        child = Child(name, command, environment, log_path)
        self._children.append(child)
        with contextlib.suppress(BrokenPipeError):  # somebody killed it: the kernel still ends the child itself
            os.write(self._guarded, f"{child.pid}\n".encode())
        return child

    def stop(self, child: Child, terminate: Callable[[], None] | None = None, deadline_s: float = 30.0) -> int | None:
        """As ``Child.stop``; the child no longer counts as needed."""
        self._children.remove(child)
        try:
            return child.stop(terminate, deadline_s)
        except BaseException:
            self._children.append(child)
            raise

    def forget(self, child: Child) -> None:
        """The child has ended: end what it left behind; it no longer counts as needed."""
        self._children.remove(child)
        child.note_memory()
        _kill(child.tree())
        child.forget_memory()

    def kill(self, child: Child) -> None:
        """SIGKILL every process of the child at once; it no longer counts as needed."""
        self._children.remove(child)
        child.kill()
        child.stop(None, 1.0)

    def require_alive(self) -> None:
        """Raises ChildFailed when a child has ended, naming all that do within a few seconds, each with its log."""
        if self._ended():
            self.explain(settle_s=3.0)

    def explain(self, settle_s: float) -> None:
        """Something went wrong: give the children ``settle_s`` to end, then raise ChildFailed if any has."""
        end = time.monotonic() + settle_s
        while time.monotonic() < end and len(self._ended()) < len(self._children):
            time.sleep(0.05)
        failures = [child.failure(f"ended with {describe_exit(code)}") for child, code in self._ended()]
        if failures:
            raise ChildFailed("\n".join(failure.message for failure in failures))

    def _ended(self) -> list[tuple[Child, int]]:
        codes = [(child, child.exit_code()) for child in self._children]
        return [(child, code) for child, code in codes if code is not None]


def describe_exit(code: int) -> str:
    """An exit code in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def end_all(processes: Iterable[psutil.Process], grace_s: float = 3.0) -> None:
    """SIGKILL what does not end by itself, Python's resource trackers last: they unlink shared memory of the dead."""
    _, remaining = psutil.wait_procs(list(processes), timeout=grace_s)
    trackers = [process for process in remaining if is_tracker(process)]
    _kill([process for process in remaining if process not in trackers])
    _, trackers = psutil.wait_procs(trackers, timeout=grace_s)
    _kill(trackers)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def _die_with(parent: int) -> Callable[[], None]:
    """In the child, before exec: SIGTERM when the parent dies, at once if it is dead already."""

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
