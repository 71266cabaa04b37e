"""The Attention side inside stock vLLM."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from .vllm_nursery import Nursery
from .vllm_process import PROMPTS, answers, answers_of, attention, chosen, f_rank, log_of, run_of, vllm

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("torch")


def refusals(vllms: Nursery, model: Path, cases: dict[str, dict[str, Any]], **how: Any) -> dict[str, str]:
    child = vllms.start("tests.attention.vllm_run:refusals", model=str(model), cases=cases, **how)
    reasons: dict[str, str] = child.result()
    return reasons


def test_each_setting_that_cannot_work_is_refused_by_name(vllms: Nursery, model: Path) -> None:
    on = attention(1)
    cases: dict[str, dict[str, Any]] = {
        "--load-format ffn_faas without an afd block": {"load_format": "ffn_faas"},
        "--enable-lora": {**on, "enable_lora": True},
        "--weight-transfer-config": {**on, "weight_transfer_config": {"backend": "nccl"}},
        "afd.num_attention_ranks=2": attention(1, num_attention_ranks=2),
        "afd.retired": attention(1, retired=1),
        "afd.role is 'ffn'": attention(1, role="ffn"),
        "enable_multithread_load": {**on, "model_loader_extra_config": {"enable_multithread_load": True}},
    }
    reasons = refusals(vllms, model, cases)
    for name, reason in reasons.items():
        assert re.match(r"(UsageError|LaunchDisagreement): ", reason), (name, reason)
        assert name in reason


def test_a_vllm_that_was_never_tried_is_refused_and_the_environment_lifts_it(vllms: Nursery, model: Path) -> None:
    cases = {"block": attention(1, connector_extra_config={"attach_timeout_s": 0.1})}
    untried = {"pretended_version": "0.99.0"}
    assert "vllm 0.99.0: was never tried" in refusals(vllms, model, cases, **untried)["block"]
    lifted = refusals(vllms, model, cases, env={"FFN_FAAS_ALLOW_UNTRIED_VLLM": "1"}, **untried)
    assert "did not answer within" in lifted["block"]


def test_an_afd_block_changes_the_compile_cache_key(vllms: Nursery, model: Path) -> None:
    cases: list[dict[str, Any]] = [{}, attention(8100), attention(8100)]
    keys = vllms.start("tests.attention.vllm_run:compile_cache_keys", model=str(model), cases=cases)
    stock, with_block, again = keys.result()
    assert stock != with_block
    assert with_block == again


def test_an_afd_block_without_the_load_format_names_the_remedy(vllms: Nursery, model: Path) -> None:
    child = vllms.start_run(run_of(model, additional_config={"afd": {"role": "attention"}}))
    assert child.wait() != 0
    assert "add --load-format ffn_faas" in child.log()


def test_without_an_afd_block_vllm_answers_as_if_the_plugin_were_not_there(
    model: Path, stock_answers: list[Any]
) -> None:
    with vllm(model) as process:
        assert answers(process) == stock_answers
        assert "remote layers" not in log_of(process)


def test_over_tcp_every_token_and_logprob_equals_stock(vllms: Nursery, model: Path, stock_answers: list[Any]) -> None:
    """With the kernel of vLLM; tests/e2e has the same over shared memory."""
    with vllms.f_rank(model, "--connector", "tcp") as (_, port):
        child = vllms.start_run(run_of(model, **attention(port)))
        assert chosen(child.result()) == stock_answers
        log = child.log()
        assert "Attention holds 0 bytes of routed experts in 4 remote layers; 96 expert tensors were not read" in log
    assert len({token for tokens, _ in stock_answers for token in tokens}) >= 10


def test_weightless_runs_need_no_weights_on_either_side(vllms: Nursery, model: Path) -> None:
    with f_rank(model, "--load-format", "dummy") as (_, port):
        weightless = {**attention(port), "model_loader_extra_config": {"dummy": True}}
        answers = answers_of(vllms, model, tokens=2, **weightless)
        assert [len(tokens) for tokens, _ in answers] == [2] * len(PROMPTS)


def test_a_mismatch_ends_vllm_with_the_text_of_f_and_f_keeps_serving(vllms: Nursery, model: Path) -> None:
    with f_rank(model, "--dtype", "float16") as (f, port):
        child = vllms.start_run(run_of(model, **attention(port)))
        assert child.wait() != 0
        assert "dtype: Attention has bfloat16, F has float16; give both sides the same --dtype" in child.log()
        assert f.poll() is None


def test_killing_f_ends_the_request_within_seconds_and_no_wrong_token_is_said(
    vllms: Nursery, model: Path, stock_answers: list[Any]
) -> None:
    with (
        vllms.f_rank(model) as (f, port),
        vllm(model, tokens=100, **attention(port)) as process,
    ):
        assert process.stdout is not None
        first = ""
        while not first.startswith("ANSWER"):
            first = process.stdout.readline()
            assert first, log_of(process)[-4000:]
        f.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        rest = process.stdout.read()
        process.wait(30)
        assert time.monotonic() - killed < 20.0
        assert process.returncode != 0
        assert f"F rank 0 at 127.0.0.1:{port} is lost" in log_of(process)
    said = [json.loads(line.partition(" ")[2]) for line in [first, *rest.splitlines()] if line.startswith("ANSWER")]
    assert len(said) < len(PROMPTS)
    for (tokens, _), (expected, _) in zip(said, stock_answers, strict=False):
        assert tokens[: len(expected)] == expected
