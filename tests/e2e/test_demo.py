"""Stock vLLM answers with its experts computed by F: what the demo measures.

What is marked large has a cheaper sister in test_architectures, without the demo's three servers.
"""

from __future__ import annotations

from typing import Any

import pytest

from .demo_process import Demos

TOKENS = 6 * 48
NEAR_TIE = 0.5
"""Natural logarithm: how far apart two tokens may be on stock where several F ranks choose the other one. Their
partial sums round elsewhere; bfloat16 logits of about 16 are 0.0625 apart, and an earlier layer's router may turn."""

THREE_RANKS = ("--eager", "--ffn-ranks", "3")


def require_a_speaking_subject(figures: dict[str, Any]) -> None:
    """Answers that repeat a few tokens would be equal by chance."""
    assert figures["tokens_compared"] == TOKENS
    assert figures["distinct_tokens"] >= 20


@pytest.mark.parametrize("mode", [pytest.param("--eager", marks=pytest.mark.large), "--compiled"])
def test_one_f_rank_with_vllms_kernel_gives_every_token_and_logprob_of_stock(demos: Demos, mode: str) -> None:
    figures = demos.figures(mode)
    require_a_speaking_subject(figures)
    assert figures["moe_kernel"] == "vllm"
    assert figures["tokens_equal"] is True
    assert figures["max_logprob_diff"] == 0.0


@pytest.mark.parametrize("mode", ["--eager", pytest.param("--compiled", marks=pytest.mark.large)])
def test_three_f_ranks_part_from_stock_only_at_near_ties(demos: Demos, mode: str) -> None:
    figures = demos.figures(mode, *THREE_RANKS[1:])
    require_a_speaking_subject(figures)
    assert figures["ffn_ranks"] == 3
    assert figures["max_layer_error_ratio"] <= 1.25
    for parting in figures["partings"]:
        assert parting["gap"] is not None
        assert parting["gap"] <= NEAR_TIE


@pytest.mark.large
def test_answers_hang_on_the_experts(demos: Demos) -> None:
    figures = demos.figures("--eager", "--control-zero")
    assert figures["tokens_compared"] == TOKENS
    assert figures["changed_tokens_fraction"] >= 0.5


def test_attention_holds_no_expert_bytes_in_any_layer(demos: Demos) -> None:
    figures = demos.figures(*THREE_RANKS)
    assert figures["attention_expert_bytes"] == 0
    assert figures["remote_layers"] == 4
    assert figures["stock_expert_bytes"] == 4 * 8 * 3 * 256 * 128 * 2


def test_the_json_names_every_promised_figure(demos: Demos) -> None:
    figures = demos.figures(*THREE_RANKS)
    promised = (
        "arch ffn_ranks moe_kernel tokens_equal tokens_compared distinct_tokens max_logprob_diff max_layer_error_ratio "
        "attention_expert_bytes stock_expert_bytes f_ready_s attention_ready_s tokens_per_s stock_tokens_per_s"
    )
    assert [name for name in promised.split() if figures[name] is None] == []


@pytest.mark.large
def test_attention_is_smaller_than_stock_by_nearly_all_expert_bytes(demos: Demos) -> None:
    figures = demos.figures("--eager", "--size", "1GiB", "--prompts", "2", "--max-tokens", "24")
    saved = figures["stock_rss_bytes"] - figures["attention_rss_bytes"]
    assert figures["stock_expert_bytes"] >= 1 << 30
    assert saved >= 0.95 * figures["stock_expert_bytes"]
    assert figures["tokens_equal"] is True
    assert figures["distinct_tokens"] >= 20
