"""A CI-sized share of the fuzz runs; docs/operations.md has the figures of whole ones."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ffn_faas.protocol import messages as protocol
from tests.fuzz import endurance, messages, windows
from tests.http.conftest import receive


@pytest.mark.parametrize(("over", "count"), [("shm", 2000), ("tcp", 300)])
def test_mutated_windows_cost_nobody_else_anything(over: str, count: int) -> None:
    target, _ = windows.run(over, count, seed=1)
    assert target.outcomes["computed"] > count / 20, "most posts were refused: the mutations are too wild to mean much"
    assert sum(target.outcomes.values()) > target.outcomes["computed"], "nothing was refused"
    target.close()


def test_mutated_messages_cost_nobody_else_anything() -> None:
    target, _ = messages.run(400, seed=1)
    target.close()


@pytest.mark.parametrize(("over", "cycles", "items"), [("shm", 1_000, 100_000), ("tcp", 500, 10_000)])
def test_sessions_that_come_and_go_leave_nothing(over: str, cycles: int, items: int) -> None:
    endurance.run(over, cycles, items)


def test_every_kept_message_is_answered_or_refused(service) -> None:
    service.to_ready()
    for name, text in messages.corpus().items():
        with service.socket() as peer, service.socket("/v1/world") as rank:
            peer.send(text)
            assert receive(peer, "granted", "refused")["type"] == ("granted" if name == "attach" else "refused"), name
            rank.send(text)
            assert receive(rank, "refused")["type"] == "refused", name
    assert service.get("/ready").status_code == 200


METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "FROB")
PATHS = ("/live", "/ready", "/status", "/metrics", "/health", "/v1/attach", "/v1/world", "/openapi.json", "/", "//")
NAMES, VALUES = st.from_regex(r"[A-Za-z-]{1,20}", fullmatch=True), st.from_regex(r"[ -~]{0,60}", fullmatch=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(METHODS),
    path=st.one_of(st.sampled_from(PATHS), st.text(st.characters(codec="ascii", min_codepoint=33), max_size=40)),
    headers=st.dictionaries(NAMES, VALUES),
    body=st.binary(max_size=2000),
)
def test_no_request_is_answered_with_a_server_error(service, method: str, path: str, headers: dict, body: bytes):
    if path.split("?", maxsplit=1)[0].rstrip("/") == "/stop" or "\\" in path:
        return
    skipped = ("host", "content-length", "transfer-encoding", "connection", "upgrade")
    kept = {name: value.strip() for name, value in headers.items() if name.lower() not in skipped}
    try:
        url = httpx.URL(f"http://127.0.0.1:{service.port}/").copy_with(raw_path=b"/" + path.lstrip("/").encode())
        answer = httpx.request(method, url, headers=kept, content=body)
    except (httpx.InvalidURL, httpx.LocalProtocolError):
        return
    expected = 503 if path.startswith("/ready") else 499
    assert answer.status_code <= expected or answer.status_code in (501, 503), answer.text
    assert service.get("/live").status_code == 200


def test_every_route_of_the_schema_answers_as_the_schema_says(service) -> None:
    schema = service.get("/openapi.json").json()
    assert {"/live", "/ready", "/status", "/metrics", "/stop"} <= set(schema["paths"])
    service.to_ready()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            answer = httpx.request(method, f"http://127.0.0.1:{service.port}{path}")
            assert str(answer.status_code) in operation["responses"], path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


@given(st.one_of(st.text(max_size=200), st.binary(max_size=200), JSON.map(json.dumps)))
def test_a_message_is_parsed_or_refused_with_one_kind_of_error(content) -> None:
    from pydantic import ValidationError

    try:
        protocol.foreign_protocol(content)
        protocol.parse(content)
    except ValidationError:
        return
