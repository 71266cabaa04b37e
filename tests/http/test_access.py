"""What the management port asks of whoever wants to change something."""

import contextlib
import socket
import ssl
import threading

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from ffn_faas.attention.link import FLink
from ffn_faas.credentials import NOTHING, Credentials, checked_token, read_token
from ffn_faas.errors import HandshakeRefused, UsageError
from ffn_faas.http.server import TlsFiles
from ffn_faas.protocol import messages
from tests.certificates import self_signed
from tests.http.conftest import Service, attach_message, receive

TOKEN = "0123456789abcdef"
PROBES = ("/live", "/health", "/v2/health/live", "/ready", "/v2/health/ready", "/status", "/metrics")


@pytest.fixture
def guarded():
    running = Service(token=TOKEN)
    running.to_ready()
    yield running
    running.server.shutdown()


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("path", PROBES)
def test_probes_need_no_token(guarded, path):
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("x"),
        bearer("0123456789abcde"),
        bearer("0123456789abcdef0"),
        bearer("0123456789ABCDEF"),
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"bearer {TOKEN}x"},
        [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer x")],
        bearer("\u00e9".encode("latin-1").decode("latin-1")),
    ],
)
def test_a_stop_without_the_token_is_refused_and_nothing_stops(guarded, headers):
    url = f"http://127.0.0.1:{guarded.port}/stop"
    pairs = [
        (name, value.encode("latin-1")) for name, value in (headers if isinstance(headers, list) else headers.items())
    ]
    answer = httpx.post(url, headers=pairs)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in answer.text
    assert not guarded.state.stop


@pytest.mark.parametrize("path", ["/stop", "/", "/anything", "/live"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_every_request_that_could_change_something_is_guarded_also_on_unknown_paths(guarded, method, path):
    assert httpx.request(method, f"http://127.0.0.1:{guarded.port}{path}").status_code == 401


def test_a_stop_with_the_token_stops(guarded):
    assert httpx.post(f"http://127.0.0.1:{guarded.port}/stop", headers=bearer(TOKEN)).status_code == 202
    assert guarded.state.stop


@pytest.mark.parametrize("path", ["/v1/attach", "/v1/world"])
@pytest.mark.parametrize("headers", [{}, bearer("wrong")])
def test_no_socket_opens_without_the_token(guarded, path, headers):
    with pytest.raises(InvalidStatus) as caught:
        connect(f"ws://127.0.0.1:{guarded.port}{path}", additional_headers=headers, proxy=None)
    assert caught.value.response.status_code == 401


def test_attention_attaches_with_the_token_and_is_told_the_remedy_without_it(guarded):
    import logging

    address, log = f"127.0.0.1:{guarded.port}", logging.getLogger("test")
    attach = messages.parse(attach_message())
    for wrong in (NOTHING, Credentials("wrong")):
        with pytest.raises(HandshakeRefused, match=r"401 .*FFN_FAAS_TOKEN"):
            FLink(0, address, log).attach(attach, wrong, 5)
    link = FLink(0, address, log)
    assert link.attach(attach, Credentials(TOKEN), 5).capacity == 256
    link.close()


def test_a_web_page_of_this_host_can_neither_stop_nor_attach_without_a_token(service):
    service.to_ready()
    origin = {"Origin": "http://example.org"}
    assert httpx.post(f"http://127.0.0.1:{service.port}/stop", headers=origin).status_code == 403
    with pytest.raises(InvalidStatus):
        connect(f"ws://127.0.0.1:{service.port}/v1/attach", additional_headers=origin, proxy=None)
    assert service.get("/ready").status_code == 200
    with service.socket() as socket_:
        socket_.send(attach_message())
        receive(socket_, "granted")


def test_a_token_file_is_read_without_the_white_space_around_it(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert read_token(str(path)) == TOKEN


@pytest.mark.parametrize("content", ["", " \n", "two words", "caf\u00e9", "x" * 5000])
def test_a_token_that_cannot_stand_in_a_header_is_refused_without_showing_it(tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_token(str(path))
    assert not content.strip() or content.strip() not in str(caught.value)


def test_credentials_and_settings_do_not_print_the_token():
    from ffn_faas.config import ServeConfig, World

    assert TOKEN not in repr(Credentials(TOKEN))
    assert TOKEN not in repr(ServeConfig(model="m", world=World(), token=TOKEN))
    assert checked_token(TOKEN, "here") == TOKEN


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_attach_over_tls_checks_the_certificate_and_plain_requests_get_nothing(certificate):
    import logging

    running = Service(token=TOKEN, tls=TlsFiles(*map(str, certificate)))
    try:
        address, log = f"127.0.0.1:{running.port}", logging.getLogger("test")
        attach = messages.parse(attach_message())
        link = FLink(0, address, log)
        assert link.attach(attach, Credentials(TOKEN, True, str(certificate[0])), 5).capacity == 256
        link.close()
        with pytest.raises(HandshakeRefused, match=r"certificate .*tls_ca_file"):
            FLink(0, address, log).attach(attach, Credentials(TOKEN, tls=True), 5)
        with pytest.raises(httpx.TransportError):
            running.get("/live")
        trusted = ssl.create_default_context(cafile=str(certificate[0]))
        assert httpx.get(f"https://{address}/live", verify=trusted).status_code == 200
    finally:
        running.server.shutdown()


def test_a_certificate_that_is_none_is_refused_before_anything_starts(certificate, tmp_path):
    with pytest.raises(UsageError, match="--ssl-certfile"):
        TlsFiles(str(tmp_path / "none.pem")).check()
    with pytest.raises(UsageError, match="--ssl-certfile"):
        TlsFiles(str(certificate[1])).check()
    TlsFiles(*map(str, certificate)).check()


def test_garbage_and_silence_on_the_port_do_not_keep_others_from_it(service):
    silent = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(50)]
    for number, connection in enumerate(silent):
        if number % 2:
            with contextlib.suppress(OSError):
                connection.sendall(bytes(range(256)) * 8)
    threads = [threading.Thread(target=service.get, args=("/live",)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for connection in silent:
        connection.close()
