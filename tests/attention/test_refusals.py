from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ffn_faas.attention.refusals import EngineFacts, LayerFacts, engine_refusals, layer_refusals, require_none
from ffn_faas.errors import UsageError

FINE = EngineFacts(vllm_version="0.32.0")
LAYER = LayerFacts(name="model.layers.3.mlp.experts")


def test_a_plain_vllm_of_a_tried_version_is_served() -> None:
    assert engine_refusals(FINE) == []
    assert engine_refusals(replace(FINE, vllm_version="0.32.0+cpu")) == []
    assert layer_refusals(LAYER) == []


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"load_format": "auto"}, "--load-format auto"),
        ({"lora": True}, "--enable-lora"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"num_redundant_experts": 2}, "eplb_config.num_redundant_experts=2"),
        ({"enable_elastic_ep": True}, "--enable-elastic-ep"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2"),
        ({"weight_updates": True}, "--weight-transfer-config"),
        ({"ubatch_size": 2}, "--ubatch-size 2"),
        ({"enable_dbo": True}, "--enable-dbo"),
        ({"quantization": "fp8"}, "quantization fp8"),
        ({"draft": "mtp"}, "speculative method mtp with experts"),
        ({"platform": "xpu"}, "vLLM on xpu"),
        ({"num_attention_ranks": 3}, "afd.num_attention_ranks=3"),
    ],
)
def test_each_engine_feature_is_refused_alone_and_by_name(change: dict[str, Any], feature: str) -> None:
    refusals = engine_refusals(replace(FINE, **change))
    assert [refusal.feature for refusal in refusals] == [feature]
    assert refusals[0].why
    assert refusals[0].remedy


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"activation": "gelu"}, "activation gelu"),
        ({"has_bias": True}, "expert biases"),
        ({"activation_limits": True}, "swiglu limit"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
        ({"skip_final_all_reduce": True}, "deferred final all-reduce"),
        ({"num_fused_shared_experts": 1}, "fused shared experts"),
        ({"zero_experts": True}, "zero experts"),
        ({"class_name": "GptOssRoutedExperts"}, "GptOssRoutedExperts"),
    ],
)
def test_each_layer_feature_is_refused_alone_naming_layer_and_feature(change: dict[str, Any], feature: str) -> None:
    refusals = layer_refusals(replace(LAYER, **change))
    assert len(refusals) == 1
    assert refusals[0].feature.startswith("model.layers.3.mlp.experts: ")
    assert feature in refusals[0].feature


def test_a_vllm_that_was_never_tried_is_refused_by_name_and_the_override_lifts_it() -> None:
    untried = replace(FINE, vllm_version="0.33.0")
    (refusal,) = engine_refusals(untried)
    assert refusal.feature == "vllm 0.33.0"
    assert "0.32.0" in refusal.why
    assert "FFN_FAAS_ALLOW_UNTRIED_VLLM" in refusal.remedy
    assert engine_refusals(replace(untried, allow_untried_vllm=True)) == []


def test_on_npu_no_version_was_tried_and_one_has_to_ask_for_it() -> None:
    (refusal,) = engine_refusals(replace(FINE, platform="npu"))
    assert "was never tried on npu" in refusal.why
    assert "(tried: none)" in refusal.why
    assert engine_refusals(replace(FINE, platform="npu", allow_untried_vllm=True)) == []


def test_a_version_tried_on_one_platform_is_untried_on_another() -> None:
    assert engine_refusals(replace(FINE, platform="cuda", vllm_version="0.23.0")) == []
    (refusal,) = engine_refusals(replace(FINE, platform="cuda"))
    assert "was never tried on cuda" in refusal.why
    assert "0.23.0" in refusal.why
    assert [refusal.feature for refusal in engine_refusals(replace(FINE, vllm_version="0.23.0"))] == ["vllm 0.23.0"]


def test_every_refusal_is_shown_at_once() -> None:
    with pytest.raises(UsageError, match=r"--enable-lora.*--enable-eplb"):
        require_none(engine_refusals(replace(FINE, lora=True, enable_eplb=True)))
    require_none([])


def test_the_afd_block_counts_the_ranks_of_the_whole_deployment() -> None:
    assert engine_refusals(replace(FINE, world_size=4, num_attention_ranks=4)) == []
    (refusal,) = engine_refusals(replace(FINE, world_size=4, num_attention_ranks=2))
    assert refusal.why == "this vLLM has 4 ranks"


def test_speculation_and_sizes_of_one_are_no_reason_to_refuse() -> None:
    assert engine_refusals(replace(FINE, num_attention_ranks=1, enable_dbo=False, ubatch_size=0)) == []
