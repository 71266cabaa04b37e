"""F's answer to an Attach: each refusal names both values."""

import pytest

from ffn_faas.protocol import PROTOCOL_VERSION, handshake
from ffn_faas.protocol.messages import Attach, Fingerprint, HostIdentity

FINGERPRINT = Fingerprint(
    architecture="Qwen3MoeForCausalLM",
    hidden_size=64,
    intermediate_size=32,
    num_experts=8,
    top_k=2,
    dtype="bfloat16",
    activation="silu",
    quantization="none",
    num_moe_layers=4,
    checkpoint="aa" * 32,
)
HOST = HostIdentity(boot_id="1234567890", network_namespace="net:[1]")
OFFER = handshake.Offer(fingerprint=FINGERPRINT, host=HOST, num_ffn_ranks=2, max_capacity=512)


def attach(**changes):
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "software_version": "0.1.0",
        "peer": "vllm 0.32.0",
        "instance": "i",
        "attention_rank": 0,
        "num_attention_ranks": 1,
        "stages": 1,
        "capacity": 256,
        "host": HOST,
        "fingerprint": FINGERPRINT,
    }
    return Attach(**(fields | changes))


def test_an_attach_that_fits_is_granted():
    assert handshake.refusal(attach(), OFFER) is None


@pytest.mark.parametrize(("theirs", "ours"), [("shm", "m2n"), ("m2n", "shm")])
def test_both_sides_must_speak_one_transport(theirs, ours):
    offer = handshake.Offer(fingerprint=FINGERPRINT, host=HOST, num_ffn_ranks=2, max_capacity=512, transport=ours)
    assert f"Attention uses {theirs}, F uses {ours}" in handshake.refusal(attach(transport=theirs), offer)
    assert handshake.refusal(attach(transport=ours), offer) is None


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("architecture", "MixtralForCausalLM"),
        ("hidden_size", 96),
        ("intermediate_size", 96),
        ("num_experts", 16),
        ("top_k", 4),
        ("dtype", "float16"),
        ("activation", "gelu"),
        ("quantization", "fp8"),
        ("num_moe_layers", 5),
        ("checkpoint", "bb" * 32),
    ],
)
def test_each_field_of_the_fingerprint_is_compared_and_both_values_are_named(field, theirs):
    reason = handshake.refusal(attach(fingerprint=FINGERPRINT.model_copy(update={field: theirs})), OFFER)
    assert reason is not None
    assert str(theirs) in reason
    assert str(getattr(FINGERPRINT, field)) in reason


def test_no_field_of_the_fingerprint_is_left_out_of_the_cases_above():
    cases = test_each_field_of_the_fingerprint_is_compared_and_both_values_are_named.pytestmark[0].args[1]
    assert {field for field, _ in cases} == set(Fingerprint.model_fields)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, [str(PROTOCOL_VERSION + 1), str(PROTOCOL_VERSION)]),
        ({"num_ffn_ranks": 3}, ["3", "2"]),
        ({"capacity": 1024, "capacity_is_required": True}, ["1024", "512", "--max-num-batched-tokens"]),
        ({"host": HostIdentity(boot_id="otherboot", network_namespace="net:[1]")}, ["otherboo", "12345678"]),
        ({"host": HostIdentity(boot_id="1234567890", network_namespace="net:[9]")}, ["net:[9]", "net:[1]"]),
        ({"attention_rank": 2, "num_attention_ranks": 2}, ["rank 2", "2 A ranks"]),
    ],
)
def test_other_mismatches_name_both_values(changes, values):
    reason = handshake.refusal(attach(**changes), OFFER)
    assert reason is not None
    for value in values:
        assert value in reason


def test_a_capacity_nobody_asked_for_is_granted_up_to_the_limit():
    assert handshake.granted_capacity(attach(capacity=4096), OFFER) == 512
    assert handshake.refusal(attach(capacity=4096), OFFER) is None
    assert handshake.granted_capacity(attach(capacity=100), OFFER) == 100
