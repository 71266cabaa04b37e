"""The handshake of transport cam: everything equal before weights, one Attention, phase pairing on the probes."""

from __future__ import annotations

import json

import pytest

from ffn_faas.protocol.handshake import Offer, refusal
from ffn_faas.protocol.messages import Attach, CamTerms
from ffn_faas.service.lifecycle import Phase
from tests.http.conftest import FINGERPRINT, HOST, Service, attach_message, receive

TERMS = CamTerms(
    num_attention_ranks=4,
    attn_ranks_per_dp=2,
    max_num_batched_tokens=64,
    dynamic_quant=True,
    ffn_mega_moe=False,
    cam_ops="cpu-twin",
    cam_twin_directory="/dev/shm/twin",
)
OFFER = Offer(FINGERPRINT, HOST, num_ffn_ranks=2, max_capacity=64, transport="cam", cam=TERMS)


def attach(**changes) -> Attach:
    message = attach_message(transport="cam", cam=TERMS.model_dump(), num_attention_ranks=4, capacity=32, **changes)
    return Attach.model_validate_json(message)


def test_equal_terms_are_granted():
    assert refusal(attach(), OFFER) is None


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("num_attention_ranks", 2),
        ("attn_ranks_per_dp", 1),
        ("max_num_batched_tokens", 128),
        ("dynamic_quant", False),
        ("ffn_mega_moe", True),
        ("cam_ops", "afd_ascend"),
        ("cam_twin_directory", "/dev/shm/other"),
    ],
)
def test_each_term_that_differs_is_refused_with_both_values(field, other):
    theirs = attach().model_copy(update={"cam": TERMS.model_copy(update={field: other})})
    reason = refusal(theirs, OFFER)
    assert reason is not None
    assert f"{field}: Attention has {other}, F has {getattr(TERMS, field)}" in reason


def test_a_peer_of_another_transport_is_refused_both_ways():
    reason = refusal(Attach.model_validate_json(attach_message()), OFFER)
    assert reason is not None
    assert "Attention uses shm, F uses cam" in reason
    reason = refusal(attach(), Offer(FINGERPRINT, HOST, num_ffn_ranks=2, max_capacity=64))
    assert reason is not None
    assert "Attention uses cam, F uses shm" in reason


def test_a_peer_that_says_nothing_of_its_terms_is_refused():
    reason = refusal(attach().model_copy(update={"cam": None}), OFFER)
    assert reason is not None
    assert "says nothing of its settings" in reason


def test_pairing_is_not_ready_and_says_so_to_probes_and_to_attention():
    service = Service()
    try:
        service.to(Phase.LOADING)
        service.to(Phase.PAIRING)
        answer = service.get("/ready")
        assert (answer.status_code, answer.json()["phase"]) == (503, "pairing")
        assert service.get("/live").status_code == 200
        with service.socket() as socket:
            socket.send(attach_message())
            receive(socket, "granted")
            assert json.loads(socket.recv(timeout=5))["phase"] == "pairing"
        assert 'ffn_faas:phase{phase="pairing"} 1.0' in service.get("/metrics").text
    finally:
        service.server.shutdown()


def test_whom_the_backend_does_not_admit_is_refused_with_its_words():
    service = Service()
    try:
        service.state.admit = lambda attach: f"one instance is served, {attach.instance} is another"
        service.to_ready()
        with service.socket() as socket:
            socket.send(attach_message(instance="second"))
            assert "second is another" in receive(socket, "refused")["reason"]
    finally:
        service.server.shutdown()


def test_a_second_instance_is_refused_while_one_is_attached_though_none_has_paired_yet():
    service = Service()
    try:
        service.to(Phase.LOADING)
        service.state.offer = OFFER
        service.state.world.addresses = ["a:1", "b:2"]
        with service.socket() as first, service.socket() as second:
            first.send(attach(instance="first").model_dump_json())
            receive(first, "granted")
            second.send(attach(instance="second", attention_rank=1).model_dump_json())
            assert "serves one Attention instance; first is attached" in receive(second, "refused")["reason"]
    finally:
        service.server.shutdown()
