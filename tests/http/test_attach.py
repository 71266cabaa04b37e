"""The attach socket: grants, refusals, windows, ends."""

import json
from contextlib import contextmanager

import pytest
from websockets.exceptions import ConnectionClosed

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.protocol import messages
from ffn_faas.protocol.window import window_layout
from ffn_faas.service.lifecycle import Phase
from ffn_faas.service.sessions import Cause, Limits
from tests.http.conftest import FINGERPRINT, Service, attach_message, receive
from tests.waiting import wait_until


@contextmanager
def attached(service, **changes):
    with service.socket() as socket:
        socket.send(attach_message(**changes))
        receive(socket, "granted")
        receive(socket, "windows")
        socket.send(messages.WindowsMapped().model_dump_json())
        receive(socket, "attached")
        yield socket


def test_an_attach_is_granted_before_the_weights_are_loaded(service):
    with service.socket() as socket:
        socket.send(attach_message(capacity=4096))
        granted = receive(socket, "granted")
        assert granted["capacity"] == 512
        assert granted["expert_counts"] == [8]
        assert granted["addresses"] == [f"127.0.0.1:{service.port}"]
        service.to(Phase.LOADING)
        assert json.loads(socket.recv(timeout=5))["type"] == "progress"
        service.to(Phase.CAPTURING, Phase.READY)
        windows = receive(socket, "windows")
        assert (windows["broker"], windows["ticket"]) == ("broker", "ticket")
        assert service.connector.active == set()
        socket.send(messages.WindowsMapped().model_dump_json())
        receive(socket, "attached")
        assert service.connector.active == {1}
    geometry, epoch, counts = service.connector.opened[0]
    assert (geometry.capacity, geometry.hidden_size, geometry.top_k, geometry.element_size) == (512, 64, 2, 2)
    assert epoch == granted["epoch"]
    assert counts == [8, 8]
    wait_until(lambda: not service.connector.active, 5)


def test_a_mismatch_is_refused_naming_both_values_and_the_others_stay(service):
    service.to_ready()
    with attached(service), service.socket() as wrong:
        fingerprint = FINGERPRINT.model_copy(update={"hidden_size": 96})
        wrong.send(attach_message(instance="other", fingerprint=fingerprint))
        refused = receive(wrong, "refused")
        assert "96" in refused["reason"]
        assert "64" in refused["reason"]
        with pytest.raises(ConnectionClosed):
            wrong.recv(timeout=5)
        assert service.connector.active == {1}
        assert service.get("/ready").status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"type": "nonsense"}',
        '{"type": "attach"}',
        '{"type": "detach"}',
        attach_message().replace('"capacity":256', '"capacity":-1'),
    ],
)
def test_a_first_message_that_is_no_attach_is_refused_with_the_reason(service, text):
    with service.socket() as socket:
        socket.send(text)
        assert receive(socket, "refused")["reason"].startswith("first message")
    assert service.state.sessions.snapshot() == []


def test_a_newer_protocol_is_refused_by_its_number_even_if_its_message_has_unknown_fields(service):
    message = json.loads(attach_message()) | {"protocol_version": 99, "colour": "blue"}
    with service.socket() as socket:
        socket.send(json.dumps(message))
        assert "Attention speaks 99" in receive(socket, "refused")["reason"]


def test_layer_names_are_matched_by_name_not_by_count(service):
    with service.socket() as socket:
        socket.send(attach_message())
        receive(socket, "granted")
        socket.send(messages.Layers(names=["model.layers.1.mlp.experts"]).model_dump_json())
        assert receive(socket, "layers_accepted")["indices"] == [1]
        socket.send(messages.Layers(names=["model.layers.7.mlp.experts"]).model_dump_json())
        assert "model.layers.7.mlp.experts" in receive(socket, "refused")["reason"]
    wait_until(lambda: service.state.sessions.snapshot() == [], 5)


def test_the_same_a_rank_twice_is_refused_and_may_attach_again_after_it_left(service):
    service.to_ready()
    with attached(service), service.socket() as second:
        second.send(attach_message())
        assert "already attached" in receive(second, "refused")["reason"]
    wait_until(lambda: service.state.sessions.snapshot() == [], 5)
    with attached(service):
        assert service.connector.active == {2}


def test_the_death_of_one_a_rank_ends_its_instance_and_no_other(service):
    service.to_ready()
    with (
        attached(service, num_attention_ranks=2) as a0,
        attached(service, num_attention_ranks=2, attention_rank=1) as a1,
        attached(service, instance="other"),
    ):
        a1.socket.close()
        ended = receive(a0, "ended")
        assert "A rank 1/2" in ended["reason"]
        wait_until(lambda: service.connector.active == {3}, 5)


def test_ranks_of_one_instance_must_agree_about_their_number(service):
    service.to_ready()
    with attached(service, num_attention_ranks=2), service.socket() as socket:
        socket.send(attach_message(num_attention_ranks=3, attention_rank=1))
        reason = receive(socket, "refused")["reason"]
        assert "2 A ranks" in reason
        assert "3" in reason


def test_a_stopping_f_tells_its_attentions_and_takes_no_new_ones(service):
    service.to_ready()
    with attached(service) as socket:
        service.state.stop.request("SIGTERM")
        service.state.sessions.end_all(Cause.F_STOPPED, "F stopped: SIGTERM")
        assert receive(socket, "ended")["reason"] == "F stopped: SIGTERM"
    with service.socket() as late:
        late.send(attach_message(instance="late"))
        assert "SIGTERM" in receive(late, "refused")["reason"]


def test_an_attach_beyond_a_limit_is_refused_naming_it_and_fits_again_once_another_left():
    pair = window_layout(WindowGeometry(1, 256, 64, 2, 2)).nbytes
    service = Service(limits=Limits(max_sessions=2, window_memory=2 * pair + 100))
    try:
        service.to_ready()
        with attached(service, instance="a"):
            assert service.get("/status").json()["window_bytes"] == pair
            with service.socket() as large:
                large.send(attach_message(instance="large", capacity=512))
                reason = receive(large, "refused")["reason"]
                assert "--window-memory" in reason
                assert f"{pair} of {2 * pair + 100}" in reason
            with attached(service, instance="b"), service.socket() as third:
                third.send(attach_message(instance="c"))
                assert "at most 2 (--max-sessions)" in receive(third, "refused")["reason"]
            wait_until(lambda: len(service.state.sessions.snapshot()) == 1, 5)
            with attached(service, instance="c"):
                assert f"ffn_faas:window_bytes {float(2 * pair)}" in service.get("/metrics").text
    finally:
        service.server.shutdown()


def test_attaches_refusals_and_ends_are_counted_by_reason(service):
    service.to_ready()
    with attached(service), service.socket() as second, service.socket() as other:
        second.send(attach_message())
        receive(second, "refused")
        other.send(attach_message(instance="o", fingerprint=FINGERPRINT.model_copy(update={"top_k": 1})))
        receive(other, "refused")
    with attached(service, attempt=1) as socket:
        socket.send(messages.Detach().model_dump_json())
        wait_until(lambda: service.state.sessions.ended_total["detached"] == 1, 5)
    text = service.get("/metrics").text
    for line in (
        'attaches_total{kind="first"} 1.0',
        'attaches_total{kind="again"} 1.0',
        'attach_refusals_total{reason="conflict"} 1.0',
        'attach_refusals_total{reason="mismatch"} 1.0',
        'detaches_total{reason="connection_lost"} 1.0',
        'detaches_total{reason="detached"} 1.0',
    ):
        assert f"ffn_faas:{line}" in text


def test_an_orderly_detach_of_one_rank_is_no_error_to_its_siblings(service):
    service.to_ready()
    with (
        attached(service, num_attention_ranks=2) as a0,
        attached(service, num_attention_ranks=2, attention_rank=1) as a1,
    ):
        a1.send(messages.Detach().model_dump_json())
        wait_until(lambda: service.connector.active == {1}, 5)
        with pytest.raises(TimeoutError):
            a0.recv(timeout=0.3)
        assert [len(session.links) for session in service.state.sessions.snapshot()] == [1]
    wait_until(lambda: service.state.sessions.snapshot() == [], 5)
