"""A replay asks both servers the same, in brackets, as many at a time as it was told."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ffn_faas.bench import replay
from ffn_faas.bench.replay import Pass
from ffn_faas.errors import ResourceError, UsageError

ASKED: list[tuple[int, str]] = []


class _Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ASKED.append((self.server.server_port, body["prompt"]))
        assert body["model"] == "tiny"
        failed = body["prompt"] == "bad"
        self._answer(400 if failed else 200, {"usage": {"completion_tokens": body["max_tokens"]}})

    def _answer(self, status: int, body: dict) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[int]]:
    running = [ThreadingHTTPServer(("127.0.0.1", 0), _Server) for _ in range(2)]
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in running]
    for thread in threads:
        thread.start()
    ASKED.clear()
    yield [server.server_port for server in running]
    for server, thread in zip(running, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


def test_requests_go_to_both_in_brackets(servers: list[int]) -> None:
    requests = [{"prompt": str(number), "max_tokens": 3} for number in range(4)]
    result = replay.run(requests, [f"http://127.0.0.1:{port}" for port in servers], [1], settle_s=0)
    a, b = servers
    counted = ASKED[2:]  # one each to warm up
    assert counted == [(port, str(number)) for port in (a, b, b, a) for number in range(4)]
    (row,) = result["rows"]
    assert len(row["a_passes"]) == len(row["b_passes"]) == 2
    assert row["a_over_b"] == pytest.approx(row["a_tokens_per_s"] / row["b_tokens_per_s"])
    assert "A / B" in replay.print_table(result)


def test_as_many_requests_are_in_flight_as_asked_for() -> None:
    together = threading.Barrier(3)

    def complete(request: dict) -> int:
        together.wait(20)
        return 5

    result = replay.one_pass([{}] * 6, complete, 3)
    assert result.tokens == 30
    assert len(result.latencies) == 6


def test_fewer_requests_than_are_allowed_in_flight_are_all_sent() -> None:
    assert replay.one_pass([{}] * 2, lambda request: 1, 8).tokens == 2


def test_rates_weigh_passes_by_their_seconds() -> None:
    row = replay.row(2, [Pass(1.0, 10, [0.5]), Pass(3.0, 10, [1.5])], [Pass(2.0, 10, [1.0]), Pass(2.0, 10, [2.0])])
    assert (row["a_tokens_per_s"], row["b_tokens_per_s"], row["a_over_b"]) == (5.0, 5.0, 1.0)
    assert row["spread"] == pytest.approx(2.0)


def test_a_refused_request_and_a_wrong_file_are_named(servers: list[int], tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in servers]
    with pytest.raises(ResourceError, match="HTTP 400"):
        replay.run([{"prompt": "bad", "max_tokens": 1}], urls, [1], settle_s=0)
    with pytest.raises(UsageError, match="two are needed"):
        replay.run([{"prompt": "x"}], urls[:1], [1])
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "x"}\n\n{"max_tokens": 3}\n')
    with pytest.raises(UsageError, match="line 3: an object with a prompt"):
        replay.read_requests(file)
    file.write_text('{"prompt": [1, 2], "max_tokens": 3}\n')
    assert replay.read_requests(file) == [{"prompt": [1, 2], "max_tokens": 3}]
