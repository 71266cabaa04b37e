"""The worker's watch of the vLLM that it belongs to, over trees of real processes like vLLM's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

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
    if how == "unmarked":
        worker(False)
    mark_first_process()
    if how == "another vLLM":
        subprocess.run([sys.executable, __file__, "orderly"])
    else:
        spawned = multiprocessing.get_context("spawn").Process(target=engine, args=(how == "stubborn",))
        spawned.start()
        spawned.join()
"""


@contextmanager
def processes(tmp_path: Path, how: str, **environment: str) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """The first process of such a tree and its worker, which watches."""
    program = tmp_path / "first.py"
    program.write_text(FIRST)
    process = subprocess.Popen(
        [sys.executable, program, how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
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


def test_a_process_that_is_no_ancestor_is_not_watched(tmp_path: Path) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger,
        processes(tmp_path, "unmarked", FFN_FAAS_VLLM_PROCESS=str(stranger.pid)) as (first, worker),
    ):
        assert worker == first
        stranger.kill()
        stranger.wait()
        with pytest.raises(psutil.TimeoutExpired):
            worker.wait(1)
