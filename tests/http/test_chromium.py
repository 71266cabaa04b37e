"""The browser of these tests does not outlive them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.http.chromium import executable

DYING = """
import os, signal
from tests.http.chromium import Browser
browser = Browser().__enter__()
browser.open("about:blank")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def short_path():
    """Chromium makes a socket there, whose whole path has to stay below 108 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.mark.skipif(executable() is None, reason="no Chromium is installed")
def test_chromium_ends_with_the_process_that_opened_it_however_that_ends(short_path):
    environment = os.environ | {"TMPDIR": str(short_path)}
    died = subprocess.run(
        [sys.executable, "-c", DYING], env=environment, cwd=Path(__file__).parents[2], check=False, timeout=120
    )
    assert died.returncode == -9
    assert list(short_path.iterdir()), "there was a browser, with its profile here"
    end = time.monotonic() + 20
    while left := [
        p.pid for p in psutil.process_iter(["cmdline"]) if str(short_path) in " ".join(p.info["cmdline"] or [])
    ]:
        assert time.monotonic() < end, left
        time.sleep(0.05)
