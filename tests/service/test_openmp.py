"""F's OpenMP threads leave the cores to Attention between items."""

import os
import subprocess
import sys

import pytest

from ffn_faas import env

_CPU_OF_A_REST = """
import os, sys, time
from ffn_faas import env
if sys.argv[1] == "calm":
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


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "active" if name == "OMP_WAIT_POLICY" else "7")
    before = dict(os.environ)
    env.calm_openmp()
    assert dict(os.environ) == before


def test_threads_rest_between_items() -> None:
    """Of 50 ms after a loop, threads that spin for milliseconds take some; ours take none to speak of."""
    result = subprocess.run(
        [sys.executable, "-c", _CPU_OF_A_REST, "calm"], check=True, capture_output=True, text=True, timeout=120
    )
    assert float(result.stdout) < 0.001
