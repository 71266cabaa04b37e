"""The worker's watch of the vLLM that it belongs to, over trees of real processes like vLLM's."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ffn_faas.attention.orphan import ProcessIdentity, end_with_first_process
from ffn_faas.errors import SessionLost

GONE_S = 10.0
FIRST = """
import logging, multiprocessing, os, signal, subprocess, sys, time
from ffn_faas.attention.orphan import end_with_first_process, mark_first_process

def worker(stubborn):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_first_process(logging.getLogger(), limit_s=0.5)
    print(os.getpid(), flush=True)
    time.sleep(100)

def engine(stubborn):
    mark_first_process()  # as the plugin does in every process
    child = multiprocessing.get_context("spawn").Process(target=worker, args=(stubborn,))
    child.start()
    child.join()

if __name__ == "__main__":
    how = sys.argv[1]
    mark_first_process()
    if how == "another vLLM":
        subprocess.run([sys.executable, __file__, "orderly"])
    else:
        spawned = multiprocessing.get_context("spawn").Process(target=engine, args=(how == "stubborn",))
        spawned.start()
        spawned.join()
"""


@contextmanager
def processes(tmp_path: Path, how: str) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """The first process of such a tree and its worker, which watches."""
    program = tmp_path / "first.py"
    program.write_text(FIRST)
    process = subprocess.Popen(
        [sys.executable, program, how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        yield psutil.Process(process.pid), worker
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


@pytest.mark.parametrize("how", ["orderly", "stubborn"])
def test_a_worker_ends_with_the_first_process_though_the_engine_between_them_lives(tmp_path: Path, how: str) -> None:
    with processes(tmp_path, how) as (first, worker):
        engine = worker.parent()
        assert engine is not None
        assert engine.ppid() == first.pid
        first.kill()
        psutil.wait_procs([worker, engine], timeout=GONE_S)
        assert not worker.is_running()


def test_a_vllm_that_another_one_started_outlives_it(tmp_path: Path) -> None:
    with processes(tmp_path, "another vLLM") as (first, worker):
        engine = worker.parent()
        assert engine is not None
        second = engine.parent()
        assert second is not None
        assert second.ppid() == first.pid
        first.kill()
        first.wait(GONE_S)
        with pytest.raises(psutil.TimeoutExpired):
            worker.wait(1)
        second.kill()
        worker.wait(GONE_S)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_worker_that_attaches_after_that_end_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, stranger: subprocess.Popen[bytes]
) -> None:
    identity = ProcessIdentity.of(stranger.pid)
    monkeypatch.setenv("FFN_FAAS_VLLM_PROCESS", str(identity))
    stranger.kill()
    stranger.wait()
    with pytest.raises(SessionLost, match=f"vLLM's process {stranger.pid} is gone"):
        end_with_first_process(logging.getLogger())


def test_a_later_process_of_the_same_number_is_not_the_first_one(
    monkeypatch: pytest.MonkeyPatch, stranger: subprocess.Popen[bytes]
) -> None:
    later = ProcessIdentity.of(stranger.pid)
    assert later is not None
    monkeypatch.setenv("FFN_FAAS_VLLM_PROCESS", str(replace(later, started=later.started - 1)))
    with pytest.raises(SessionLost):
        end_with_first_process(logging.getLogger())


@pytest.mark.parametrize("where", ["another host", "here, the process itself"])
def test_nothing_is_watched(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    this = ProcessIdentity.of(os.getpid())
    assert this is not None
    first = this if "itself" in where else replace(this, pid=1, where=where)
    monkeypatch.setenv("FFN_FAAS_VLLM_PROCESS", str(first))
    before = threading.active_count()
    end_with_first_process(logging.getLogger())
    assert threading.active_count() == before
