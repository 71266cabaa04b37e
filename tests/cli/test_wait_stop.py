"""``wait`` and ``stop`` against management ports that answer what a test says, and against a real daemon."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ffn_faas.cli import main, stop, wait
from ffn_faas.http.server import TlsFiles
from tests.certificates import self_signed
from tests.http.conftest import Service
from tests.service.daemon import Daemon, free_port, model_dir, wait_ready


@contextmanager
def answering(replies: list[dict], port: int, requests: list | None = None) -> Iterator[None]:
    """GET /status is answered with each of ``replies`` in turn, the last one for ever; POST with 403."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, replies.pop(0) if len(replies) > 1 else replies[0])

        def do_POST(self) -> None:
            (requests if requests is not None else []).append((self.path, self.headers["Authorization"]))
            self._answer(403, {"detail": "no token"})

        def _answer(self, status: int, body: dict) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "POLL_S", 0.01)


def status(phase: str, *addresses: str) -> dict:
    return {"phase": phase, "addresses": list(addresses)}


def test_wait_returns_once_f_is_ready_and_says_meanwhile_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    here = f"127.0.0.1:{port}"
    with answering([status("starting", ""), status("loading", here), status("ready", here)], port):
        assert main(["wait", "--port", str(port), "--timeout", "60"]) == 0
    said = capsys.readouterr().err
    assert "F rank 0 has not joined" in said
    assert "F rank 0 is loading" in said


def test_wait_asks_every_rank_that_rank_0_lists(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port(2)
    first = status("ready", f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}")
    with answering([first], port), answering([status("loading"), status("ready")], port + 1):
        assert main(["wait", "--port", str(port), "--timeout", "60"]) == 0
    assert "F rank 1 is loading" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("phase", "wanted", "code"),
    [("pairing", "pairing", 0), ("pairing", "ready", 5), ("ready", "pairing", 0), ("capturing", "pairing", 5)],
)
def test_pairing_is_far_enough_only_where_it_was_asked_for(phase: str, wanted: str, code: int) -> None:
    port = free_port()
    with answering([status(phase, f"127.0.0.1:{port}")], port):
        assert main(["wait", "--port", str(port), "--phase", wanted, "--timeout", "0.05"]) == code


def test_live_is_what_slash_live_says(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with answering([status("loading", "")], port):
        assert main(["wait", "--port", str(port), "--phase", "live", "--timeout", "0.05"]) == 0
    assert main(["wait", "--port", str(port), "--phase", "live", "--timeout", "0.05"]) == 5


def test_wait_gives_up_naming_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["wait", "--port", str(port), "--timeout", "0.05"]) == 5
    assert f"127.0.0.1:{port} does not answer" in capsys.readouterr().err


def test_host_and_port_come_from_the_same_settings_as_for_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    monkeypatch.setenv("FFN_FAAS_HOST", "127.0.0.9")
    monkeypatch.setenv("FFN_FAAS_PORT", str(port))
    assert main(["wait", "--timeout", "0.05"]) == 5
    assert f"127.0.0.9:{port} does not answer" in capsys.readouterr().err


def test_stop_shows_the_token_and_says_so_when_f_declines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, requests = free_port(), []
    monkeypatch.setenv("FFN_FAAS_TOKEN", "secret")
    with answering([status("ready", "")], port, requests):
        assert main(["stop", "--port", str(port)]) == 2
    assert requests == [("/stop", "Bearer secret")]
    assert "HTTP 403" in capsys.readouterr().err


def test_stop_of_what_is_gone_is_done() -> None:
    assert main(["stop", "--port", str(free_port())]) == 0


@pytest.fixture
def secured(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A port that serves TLS and asks for a token, and the arguments that suit it."""
    for name in ("TOKEN", "TOKEN_FILE", "SSL_CERTFILE", "SSL_CA_CERTS"):
        monkeypatch.delenv(f"FFN_FAAS_{name}", raising=False)
    certificate, key = map(str, self_signed(tmp_path))
    (tmp_path / "token").write_text("secret\n")
    service = Service(token="secret", tls=TlsFiles(certificate, key))
    service.to_ready()
    arguments = ["--port", str(service.port), "--timeout", "20"]
    yield service, arguments, ["--ssl-ca-certs", certificate], ["--token-file", str(tmp_path / "token")]
    service.server.shutdown()


def test_over_tls_the_certificate_is_checked_and_the_token_shown(secured, capsys: pytest.CaptureFixture[str]) -> None:
    service, arguments, authorities, token = secured
    assert main(["wait", *arguments, *authorities]) == 0
    assert main(["stop", *arguments, *authorities]) == 2
    assert "HTTP 401" in capsys.readouterr().err
    threading.Timer(0.5, service.server.shutdown).start()
    assert main(["stop", *arguments, *authorities, *token]) == 0
    assert service.state.stop.reason == "POST /stop"


def test_in_f_s_own_environment_both_need_no_flags(secured, monkeypatch: pytest.MonkeyPatch) -> None:
    service, arguments, (_, certificate), _ = secured
    monkeypatch.setenv("FFN_FAAS_TOKEN", "secret")
    monkeypatch.setenv("FFN_FAAS_SSL_CERTFILE", certificate)
    monkeypatch.setenv("FFN_FAAS_SSL_CA_CERTS", certificate)
    assert main(["wait", *arguments]) == 0
    threading.Timer(0.5, service.server.shutdown).start()
    assert main(["stop", *arguments]) == 0


def test_what_can_never_be_asked_is_said_at_once(
    secured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, arguments, _, _ = secured
    assert main(["wait", *arguments, "--tls"]) == 2
    assert "certificate" in capsys.readouterr().err
    assert main(["stop", *arguments, "--tls"]) == 2
    assert "certificate" in capsys.readouterr().err
    monkeypatch.setattr(stop, "ASK_S", 0.1)
    assert main(["stop", *arguments]) == 2, "plain HTTP to a port that serves TLS"
    assert "--ssl-ca-certs" in capsys.readouterr().err
    assert main(["wait", *arguments, "--ssl-ca-certs", "/nowhere/ca.pem"]) == 2
    assert "/nowhere/ca.pem" in capsys.readouterr().err


def test_a_real_f_is_waited_for_and_stopped(tmp_path) -> None:
    port = free_port()
    with Daemon(model_dir(tmp_path), "--load-format", "dummy", "--port", port) as daemon:
        assert main(["wait", "--port", str(port), "--phase", "live", "--timeout", "120"]) == 0
        assert main(["wait", "--port", str(port), "--timeout", "120"]) == 0
        wait_ready(port, timeout=0.1)
        assert main(["stop", "--port", str(port), "--timeout", "60"]) == 0
        code, output = daemon.finish()
    assert code == 0, output
    assert "stopped: POST /stop" in output
