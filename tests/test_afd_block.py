"""The keys of connector_extra_config that say how long to wait for F."""

import pytest

from ffn_faas.afd_block import AfdBlock
from ffn_faas.errors import UsageError


def block(**extra):
    return AfdBlock.from_additional_config({"afd": {"role": "attention", "connector_extra_config": extra}}, "attention")


def test_by_default_a_lost_f_fails_requests_at_once():
    extra = block().connector_extra_config
    assert (extra.reattach_timeout_s, extra.answer_timeout_s) == (0.0, 60.0)


@pytest.mark.parametrize("key", ["reattach_timeout_s", "answer_timeout_s"])
def test_waiting_longer_than_vllm_gives_a_step_is_refused_with_both_values(key):
    assert getattr(block(**{key: 299}).connector_extra_config, key) == 299
    with pytest.raises(UsageError, match=rf"{key} is 300, but vLLM itself gives a step up after 300 s"):
        block(**{key: 300})


def test_a_negative_wait_is_refused():
    with pytest.raises(UsageError, match="reattach_timeout_s"):
        block(reattach_timeout_s=-1)
