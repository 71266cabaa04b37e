"""The Attention side inside stock vLLM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .vllm_process import PROMPTS, answers, attention, environment, f_rank, log_of, vllm

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("torch")

CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.config import set_current_vllm_config

def reason_of(settings):
    try:
        config = EngineArgs(**settings).create_engine_config()
    except Exception as error:
        return "vllm: " + str(error)
    try:
        with set_current_vllm_config(config):
            get_model_loader(config.load_config).load_model(config, config.model_config)
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    return "no refusal"

if __name__ == "__main__":
    model, cases = json.loads(sys.argv[1])
    base = dict(model=model, max_model_len=128, enforce_eager=True)
    print("REASONS " + json.dumps({name: reason_of({**base, **case}) for name, case in cases.items()}))
"""
HASHES = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.compilation.caching import aot_compile_hash_factors

if __name__ == "__main__":
    model, cases = json.loads(sys.argv[1])
    configs = [EngineArgs(model=model, **case).create_engine_config() for case in cases]
    keys = [str(aot_compile_hash_factors(config)) for config in configs]
    print("KEYS " + json.dumps(keys))
"""


def run(program: str, *payload: Any, **env: str) -> Any:
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(payload)],
        capture_output=True,
        text=True,
        env=environment(**env),
        timeout=240,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if re.match("[A-Z]+ [{[]", line)]
    assert lines, result.stderr[-4000:]
    return json.loads(lines[-1].partition(" ")[2])


def test_each_setting_that_cannot_work_is_refused_by_name(model: Path) -> None:
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
    reasons = run(CONFIGURE, str(model), cases)
    for name, reason in reasons.items():
        assert re.match(r"(UsageError|LaunchDisagreement): ", reason), (name, reason)
        assert name in reason


def test_a_vllm_that_was_never_tried_is_refused_and_the_environment_lifts_it(model: Path) -> None:
    pretend = CONFIGURE.replace(
        "import json, sys",
        "import json, sys\nfrom ffn_faas.attention import compat\ncompat.vllm_version = lambda: '0.99.0'",
        1,
    )
    unreachable = {"connector_extra_config": {"attach_timeout_s": 0.1}}
    cases = {"block": attention(1, **unreachable)}
    reasons = run(pretend, str(model), cases)
    assert "vllm 0.99.0: was never tried" in reasons["block"]
    lifted = run(pretend, str(model), cases, FFN_FAAS_ALLOW_UNTRIED_VLLM="1")
    assert "did not answer within" in lifted["block"]


def test_an_afd_block_changes_the_compile_cache_key(model: Path) -> None:
    stock, with_block, again = run(HASHES, str(model), [{}, attention(8100), attention(8100)])
    assert stock != with_block
    assert with_block == again


def test_an_afd_block_without_the_load_format_names_the_remedy(model: Path) -> None:
    with vllm(model, additional_config={"afd": {"role": "attention"}}) as process:
        process.wait(120)
        assert process.returncode != 0
        assert "add --load-format ffn_faas" in log_of(process)


def test_without_an_afd_block_vllm_answers_as_if_the_plugin_were_not_there(
    model: Path, stock_answers: list[Any]
) -> None:
    with vllm(model) as process:
        assert answers(process) == stock_answers
        assert "remote layers" not in log_of(process)


def test_over_tcp_every_token_and_logprob_equals_stock(model: Path, stock_answers: list[Any]) -> None:
    """With the kernel of vLLM; tests/e2e has the same over shared memory."""
    f = f_rank(model, "--moe-kernel", "vllm", "--connector", "tcp")
    with f as (_, port), vllm(model, **attention(port)) as process:
        assert answers(process) == stock_answers
        log = log_of(process)
        assert "Attention holds 0 bytes of routed experts in 4 remote layers; 96 expert tensors were not read" in log
    assert len({token for tokens, _ in stock_answers for token in tokens}) >= 10


def test_weightless_runs_need_no_weights_on_either_side(model: Path) -> None:
    with f_rank(model, "--load-format", "dummy") as (_, port):
        settings = attention(port)
        with vllm(model, tokens=2, **settings, model_loader_extra_config={"dummy": True}) as process:
            assert [len(tokens) for tokens, _ in answers(process)] == [2] * len(PROMPTS)


def test_a_mismatch_ends_vllm_with_the_text_of_f_and_f_keeps_serving(model: Path) -> None:
    with f_rank(model, "--dtype", "float16") as (f, port):
        with vllm(model, **attention(port)) as process:
            process.wait(120)
            assert process.returncode != 0
            assert "dtype: Attention has bfloat16, F has float16; give both sides the same --dtype" in log_of(process)
        assert f.poll() is None


def test_killing_f_ends_the_request_within_seconds_and_no_wrong_token_is_said(
    model: Path, stock_answers: list[Any]
) -> None:
    with (
        f_rank(model, "--moe-kernel", "vllm") as (f, port),
        vllm(model, tokens=100, **attention(port)) as process,
    ):
        assert process.stdout is not None
        first = ""
        while not first.startswith("ANSWER"):
            first = process.stdout.readline()
            assert first, log_of(process)[-4000:]
        f.kill()
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
