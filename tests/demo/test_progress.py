"""Waiting for a process to serve."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ffn_faas.demo.ports import free_ports
from ffn_faas.demo.processes import Child, ChildFailed, Children
from ffn_faas.demo.progress import wait_ready, watched

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        ready = Handler.asked > 2
        body = json.dumps({"phase": "ready" if ready else "loading", "progress": 0.25}).encode()
        self.send_response(200 if ready else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(children: Children, tmp_path: Path, code: str, *arguments: str) -> Child:
    return children.start("F", [sys.executable, "-c", code, *arguments], dict(os.environ), tmp_path / "log")


def test_phases_are_told_until_the_answer_is_200(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_ports()
    with Children() as children:
        child = start(children, tmp_path, SERVER, str(port))
        assert 0 < wait_ready(children, child, port, "/ready", timeout_s=30) < 30
    said = capsys.readouterr()
    assert "F: loading 25%" in said.err
    assert "F: ready after" in said.err
    assert said.out == ""


def test_a_death_ends_the_wait(tmp_path: Path) -> None:
    with Children() as children:
        child = start(children, tmp_path, "raise SystemExit(3)")
        with pytest.raises(ChildFailed, match="F ended with exit code 3"):
            wait_ready(children, child, free_ports(), "/ready", timeout_s=60)


def test_silence_ends_in_an_error_that_names_the_child_and_the_time(tmp_path: Path) -> None:
    with Children() as children:
        child = start(children, tmp_path, "import time; time.sleep(600)")
        with pytest.raises(ChildFailed, match="F was not ready after 0 s"):
            wait_ready(children, child, free_ports(), "/ready", timeout_s=0.2)


def test_a_death_during_work_is_told_in_place_of_the_works_own_failure(tmp_path: Path) -> None:
    def work() -> None:
        raise ConnectionResetError

    with Children() as children:
        start(children, tmp_path, "raise SystemExit(3)")
        with pytest.raises(ChildFailed, match="F ended with exit code 3"):
            watched(children, work)


def test_the_works_result_comes_back(tmp_path: Path) -> None:
    with Children() as children:
        start(children, tmp_path, "import time; time.sleep(600)")
        assert watched(children, lambda: 7) == 7
