"""What the demo starts."""

from __future__ import annotations

import json
from pathlib import Path

from ffn_faas.demo import commands

MODEL, CACHE = Path("/model"), Path("/cache")


def test_attention_is_stock_with_a_load_format_and_an_afd_block_and_nothing_else() -> None:
    attention = commands.attention(MODEL, 9000, 8100, compiled=False, cache=CACHE)
    stock = commands.stock(MODEL, 9000, compiled=False, cache=CACHE)
    extra = attention.arguments[len(stock.arguments) :]
    assert attention.arguments[: len(stock.arguments)] == stock.arguments
    assert extra[:3] == ["--load-format", "ffn_faas", "--additional-config"]
    assert json.loads(extra[3]) == {"afd": {"role": "attention", "host": "127.0.0.1", "port": 8100}}
    differing = {name for name, value in attention.environment.items() if stock.environment.get(name) != value}
    assert differing == {"VLLM_PLUGINS"}


def test_stock_loads_no_plugin() -> None:
    assert commands.stock(MODEL, 9000, compiled=True, cache=CACHE).environment["VLLM_PLUGINS"] == ""


def test_compiled_is_vllms_default() -> None:
    assert "--enforce-eager" in commands.stock(MODEL, 9000, compiled=False, cache=CACHE).arguments
    assert "--enforce-eager" not in commands.stock(MODEL, 9000, compiled=True, cache=CACHE).arguments


def test_one_f_rank_needs_no_launcher_and_more_do() -> None:
    one = commands.ffn(MODEL, 8100, 1, "vllm", 29000).arguments
    three = commands.ffn(MODEL, 8100, 3, "vllm", 29000).arguments
    assert one[1:5] == ["-m", "ffn_faas", "serve", "/model"]
    assert three[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "3"]
    assert three[-len(one) + 1 :] == one[1:]
