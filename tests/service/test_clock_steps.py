"""A time of day that jumps by hours, as a corrected clock does, ends nothing: waits count on the monotonic clock."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.daemon import Daemon, free_port, model_dir, wait_ready

ROOT = Path(__file__).parents[2]
STEPPING_CLOCK = """
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

// The time of day is an hour early, right, or an hour late, in turns of 50 ms.
static time_t step() {
  timespec now;
  static auto real = reinterpret_cast<int (*)(clockid_t, timespec*)>(dlsym(RTLD_NEXT, "clock_gettime"));
  real(CLOCK_MONOTONIC, &now);
  return ((now.tv_sec * 20 + now.tv_nsec / 50000000) % 3 - 1) * 3600;
}

extern "C" int clock_gettime(clockid_t clock, timespec* at) {
  static auto real = reinterpret_cast<int (*)(clockid_t, timespec*)>(dlsym(RTLD_NEXT, "clock_gettime"));
  int result = real(clock, at);
  if (clock == CLOCK_REALTIME) at->tv_sec += step();
  return result;
}

extern "C" int gettimeofday(timeval* at, void* zone) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}

extern "C" time_t time(time_t* at) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def stepping(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the time of day jumps for everything that the C library tells it."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the stepping clock")
    directory = tmp_path_factory.mktemp("clock")
    (directory / "clock.cpp").write_text(STEPPING_CLOCK)
    library = directory / "clock.so"
    command = ["g++", "-shared", "-fPIC", "-O1", str(directory / "clock.cpp"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}


def test_the_clock_really_steps(stepping: dict[str, str]) -> None:
    program = "import time\nfor _ in range(40): print(time.time()); time.sleep(0.01)"
    run = subprocess.run([sys.executable, "-c", program], env=os.environ | stepping, capture_output=True, check=True)
    told = sorted(map(float, run.stdout.split()))
    assert told[-1] - told[0] > 3600


def test_sessions_live_and_answers_stay_while_the_clock_steps(tmp_path: Path, stepping: dict[str, str]) -> None:
    model, port = model_dir(tmp_path), free_port()
    flags = ("--load-format", "dummy", "--port", port, "--stall-timeout", "1")
    arguments = {"model": str(model), "address": f"127.0.0.1:{port}", "rounds": 2000}
    with Daemon(model, *flags, environment=stepping) as daemon:
        wait_ready(port)
        attention = subprocess.Popen(
            [sys.executable, "-m", "tests.service.remote_attention", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | stepping,
        )
        said, _ = attention.communicate("go\n", timeout=60)
        assert "done 2000 equal" in said
        assert daemon.process.poll() is None
        daemon.process.terminate()
        code, output = daemon.finish()
    assert code == 0, output
    assert " ERROR " not in output
