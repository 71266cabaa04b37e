"""Children of the demo: nothing of them stays."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ffn_faas.demo.guardian import LOOK_S
from ffn_faas.demo.processes import Child, ChildFailed, Children

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
DEMO = """
import os, sys, time
from pathlib import Path
from ffn_faas.demo.processes import Children
with Children() as children:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = children.start("child", command, dict(os.environ), Path(sys.argv[1]))
    print(child.pid, flush=True)
    time.sleep(600)
"""


def start(children: Children, tmp_path: Path, code: str, name: str = "child") -> Child:
    return children.start(name, [sys.executable, "-c", code], dict(os.environ), tmp_path / f"{name}.log")


@contextmanager
def demo_of(program: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """DEMO with ``program`` as its child; killed at the end."""
    code = DEMO.replace('"import time; time.sleep(600)"', repr(program))
    with subprocess.Popen([sys.executable, "-c", code, str(log)], stdout=subprocess.PIPE, text=True) as demo:
        try:
            yield demo
        finally:
            demo.kill()


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def guardians() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "ffn_faas.demo.guardian" in command_of(child)]


def grandchild_of(child: Child) -> int:
    assert eventually(lambda: child.log_text().strip() != "")
    return int(child.log_text())


def test_leaving_ends_children_and_grandchildren_in_other_sessions(tmp_path: Path) -> None:
    with Children() as children:
        child = start(children, tmp_path, FAMILY)
        grandchild = grandchild_of(child)
        assert grandchild in [process.pid for process in child.tree()]
    assert gone(child.pid)
    assert gone(grandchild)


def test_what_a_killed_child_leaves_behind_ends_too(tmp_path: Path) -> None:
    with Children() as children:
        child = start(children, tmp_path, FAMILY)
        grandchild = grandchild_of(child)
        os.kill(child.pid, signal.SIGKILL)
        assert eventually(lambda: child.exit_code() == -signal.SIGKILL)
        assert not gone(grandchild)
    assert gone(grandchild)


def test_a_child_dies_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    with demo_of("import time; time.sleep(600)", tmp_path / "log") as demo:
        assert demo.stdout is not None
        child = int(demo.stdout.readline())
        demo.kill()
        assert eventually(lambda: gone(child))


def test_what_a_child_of_a_killed_demo_leaves_in_its_session_ends_too(tmp_path: Path) -> None:
    with demo_of(FAMILY.replace(", start_new_session=True", ""), tmp_path / "log") as demo:
        assert demo.stdout is not None
        child = int(demo.stdout.readline())
        assert eventually(lambda: (tmp_path / "log").read_text().strip() != "")
        grandchild = int((tmp_path / "log").read_text())
        demo.kill()
        assert eventually(lambda: gone(child))
        assert eventually(lambda: gone(grandchild))


def test_what_lived_before_the_children_stays() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as before:
        with Children():
            pass
        assert before.poll() is None
        before.kill()


HOLDER = """
import os, signal, time
from multiprocessing import resource_tracker, shared_memory
held = shared_memory.SharedMemory(create=True, size=4096)
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
print(held._name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["leave", "stop", "kill"])
def test_shared_memory_goes_although_its_tracker_was_killed(tmp_path: Path, end: str) -> None:
    with Children() as children:
        child = start(children, tmp_path, HOLDER)
        assert eventually(lambda: child.log_text().strip() != "")
        file = Path("/dev/shm") / child.log_text().strip().lstrip("/")
        assert file.exists()
        if end == "stop":
            children.stop(child)
            assert not file.exists()
        elif end == "kill":
            children.kill(child)
            assert not file.exists()
    assert not file.exists()


def test_shared_memory_that_others_use_stays(tmp_path: Path) -> None:
    with Children() as children:
        child = start(children, tmp_path, HOLDER)
        assert eventually(lambda: child.log_text().strip() != "")
        file = Path("/dev/shm") / child.log_text().strip().lstrip("/")
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4096):
            children.stop(child)
            assert file.exists()
        file.unlink()


def test_shared_memory_of_a_killed_demo_goes_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with demo_of(HOLDER, log) as demo:
        assert eventually(lambda: log.exists() and log.read_text().strip() != "")
        file = Path("/dev/shm") / log.read_text().strip().lstrip("/")
        assert file.exists()
        time.sleep(10 * LOOK_S)  # the guardian has looked, on a busy machine too
        demo.kill()
        assert eventually(lambda: not file.exists())


def test_a_killed_guardian_harms_nobody(tmp_path: Path) -> None:
    with Children() as children:
        assert eventually(lambda: bool(guardians()))
        (guardian,) = guardians()
        guardian.kill()
        guardian.wait(10)
        child = start(children, tmp_path, FAMILY)
        grandchild_of(child)
    assert gone(child.pid)


def test_a_death_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    with Children() as children:
        child = start(children, tmp_path, "print('the oven is cold'); raise SystemExit(4)", "oven")
        assert eventually(lambda: child.exit_code() is not None)
        with pytest.raises(ChildFailed, match=r"oven ended with exit code 4(?s:.*)the oven is cold"):
            children.require_alive()


def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    with Children() as children:
        child = start(children, tmp_path, deaf)
        assert eventually(lambda: "deaf" in child.log_text())
        assert children.stop(child, deadline_s=0.2) is None
        assert gone(child.pid)


def test_a_stopped_child_is_not_missed(tmp_path: Path) -> None:
    with Children() as children:
        child = start(children, tmp_path, "import time; time.sleep(600)")
        assert children.stop(child) == -signal.SIGTERM
        children.require_alive()


def test_memory_covers_the_whole_tree(tmp_path: Path) -> None:
    with Children() as children:
        child = start(children, tmp_path, FAMILY)
        grandchild = grandchild_of(child)
        rss, pss = child.memory()
        assert rss >= psutil.Process(child.pid).memory_info().rss
        assert rss >= psutil.Process(grandchild).memory_info().rss
        assert 0 < pss <= rss


def test_an_error_buried_under_a_launchers_summary_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "print('12:00 [F1/3] ERROR the oven is cold'); print('all is well'); print('summary\\n' * 200)"
    child = Child("F", [sys.executable, "-c", code], dict(os.environ), log)
    assert eventually(lambda: child.exit_code() == 0)
    lines = child.log_tail(10).splitlines()
    assert lines[0].strip() == "12:00 [F1/3] ERROR the oven is cold"
    assert "all is well" not in child.log_tail(10)
