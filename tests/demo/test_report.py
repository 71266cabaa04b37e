"""What a demo promises, and what it says when it does not hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ffn_faas.demo.answers import Answer, ServedRun
from ffn_faas.demo.options import DemoOptions
from ffn_faas.demo.report import as_json, as_text, failure
from ffn_faas.demo.runner import DemoResult

OPTIONS = DemoOptions(work_dir=Path("/work"))


def run_of(tokens: list[int], rss: int = 100) -> ServedRun:
    top = [{f"token_id:{token}": -1.0} for token in tokens]
    return ServedRun([Answer("Once", " upon", tokens, [-1.0] * len(tokens), top, 2.0)], 1.0, rss, rss)


def result_of(attention: ServedRun, stock: ServedRun | None, held: int = 0) -> DemoResult:
    return DemoResult(attention, stock, False, 0.5, 50, held, 4, 1024)


def test_equal_tokens_are_no_failure() -> None:
    result = result_of(run_of([1, 2, 2]), run_of([1, 2, 2], rss=300))
    figures = json.loads(json.dumps(as_json(OPTIONS, result)))
    assert (figures["tokens_equal"], figures["tokens_compared"], figures["distinct_tokens"]) == (True, 3, 2)
    assert (figures["tokens_per_s"], figures["stock_rss_bytes"] - figures["attention_rss_bytes"]) == (1.5, 200)
    assert failure(OPTIONS, figures) is None
    assert "all 3 tokens equal" in as_text(OPTIONS, result)


def test_differing_tokens_fail_only_where_equality_is_promised() -> None:
    figures = as_json(OPTIONS, result_of(run_of([1, 2]), run_of([1, 3])))
    assert "50.0% of the tokens differ" in str(failure(OPTIONS, figures))
    assert failure(replace(OPTIONS, ffn_ranks=3), figures) is None
    assert failure(replace(OPTIONS, moe_kernel="torch"), figures) is None


def test_expert_bytes_on_attention_fail() -> None:
    figures = as_json(OPTIONS, result_of(run_of([1]), None, held=64))
    assert "holds 64 bytes of routed experts" in str(failure(OPTIONS, figures))


def test_without_stock_nothing_is_claimed() -> None:
    result = result_of(run_of([1]), None)
    figures = as_json(OPTIONS, result)
    assert figures["tokens_equal"] is None
    assert failure(OPTIONS, figures) is None
    assert "stock" not in as_text(OPTIONS, result)


def test_the_control_is_told_as_one() -> None:
    control = replace(OPTIONS, moe_kernel="zero")
    assert "as they should" in as_text(control, result_of(run_of([1, 2]), run_of([3, 4])))
