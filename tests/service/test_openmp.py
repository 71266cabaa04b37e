"""F's OpenMP threads leave the cores to Attention between items."""

import os
import subprocess
import sys
from typing import Any

import pytest

from ffn_faas import env
from ffn_faas.cli import bench, bench_cpu, serve
from ffn_faas.service import host

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
CALM = {"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
_CPU_OF_A_REST = """
import time
from ffn_faas import env
env.calm_openmp()
import torch
torch.set_num_threads(2)
rows = torch.ones(1 << 20)
used = []
for _ in range(20):
    rows.add_(1.0)
    before = time.process_time()
    time.sleep(0.05)
    used.append(time.process_time() - before)
print(sorted(used)[len(used) // 2])
"""


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # as good as unset, and taken back afterwards


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "active" if name == "OMP_WAIT_POLICY" else "7")
    before = dict(os.environ)
    env.calm_openmp()
    assert dict(os.environ) == before


@pytest.mark.usefixtures("nothing_said")
def test_serve_says_how_to_wait_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def start(*_: object, **__: object) -> int:
        seen.update((name, os.environ[name]) for name in NAMES)
        return 0

    monkeypatch.setattr(host, "serve", start)
    assert serve.run(["MODEL"]) == 0
    assert seen == CALM


@pytest.mark.usefixtures("nothing_said")
def test_bench_says_it_too_so_that_no_kernel_is_measured_beside_spinning_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, str] = {}

    def measure(_: object) -> tuple[dict[str, Any], str]:
        seen.update((name, os.environ[name]) for name in NAMES)
        return {}, ""

    monkeypatch.setattr(bench_cpu, "measure", measure)
    assert bench.run([]) == 0
    assert seen == CALM


@pytest.mark.usefixtures("nothing_said")
def test_threads_rest_between_items() -> None:
    """CPU time of 50 ms of rest: threads that spin for milliseconds take 4.9 ms of it, ours next to nothing."""
    result = subprocess.run(
        [sys.executable, "-c", _CPU_OF_A_REST], check=True, capture_output=True, text=True, timeout=120
    )
    assert float(result.stdout) < 0.001
