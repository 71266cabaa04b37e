"""What a CAM system refuses before it starts, and the sizes it reckons."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffn_faas import env
from ffn_faas.afd_block import AfdBlock
from ffn_faas.ascend.settings import CamSettings
from ffn_faas.ascend.shape import CamShape, receive_rows
from ffn_faas.cli.serve import parse
from ffn_faas.errors import LaunchDisagreement, UsageError

FLASH = CamShape(
    attention_ranks=12, ffn_ranks=4, num_experts=256, top_k=6, hidden_size=4096, max_num_batched_tokens=8192
)
CAM = ["m", "--backend", "npu-async-cam", "--additional-config.afd.num_attention_ranks", "4"]
EXTRA = "--additional-config.afd.connector_extra_config"


def with_extra(key, value):
    return [*CAM, f"{EXTRA}.{key}", value]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "BATCH_SIZE_FACTOR", "LCCL_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_four_keys_are_read_and_the_rest_has_defaults():
    config, _ = parse(
        [
            *with_extra("dynamicQuant", "0"),
            *(f"{EXTRA}.attn_ranks_per_dp=2", f"{EXTRA}.hccl_buffer_size=2048", f"{EXTRA}.ffn_mega_moe=true"),
        ]
    )
    assert config.cam == CamSettings(4, tensor_parallel=2, dynamic_quant=False, mega=True, hccl_buffer_mib=2048)
    assert parse(CAM)[0].cam == CamSettings(4)
    assert parse(["m"])[0].cam is None


def test_the_twin_is_chosen_by_an_explicit_flag_only():
    config, _ = parse([*CAM, "--cam-ops", "cpu-twin", "--cam-twin-directory", "/somewhere"])
    assert config.cam is not None
    assert (config.cam.ops, config.cam.twin_directory) == ("cpu-twin", "/somewhere")
    for half in (["--cam-ops", "cpu-twin"], ["--cam-twin-directory", "/somewhere"]):
        with pytest.raises(UsageError, match="the twin, and only it, needs one"):
            parse([*CAM, *half])


def test_the_backend_has_its_documented_shutdown_budget_unless_another_is_given():
    assert parse(CAM)[0].drain_timeout_s == 60
    assert parse([*CAM, "--drain-timeout", "7"])[0].drain_timeout_s == 7
    assert parse(["m"])[0].drain_timeout_s == 15


@pytest.mark.parametrize(
    "key",
    [
        "ffn_two_stream",
        "ffn_compute_aic_num",
        "ffn_compute_aiv_num",
        "ffn_combine_aiv_num",
        "core_num",
        "shared_ffn_pool",
    ],
)
@pytest.mark.parametrize("value", ["false", "8"])
def test_a_retired_key_is_refused_by_name_even_when_false(key, value):
    with pytest.raises(UsageError, match=f"{key} is a retired key .*use instead"):
        parse(with_extra(key, value))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (with_extra("dynamic_quant", "1"), "dynamic_quant is not a known key"),
        (with_extra("colour", "1"), "connector_extra_config.colour is not a known key"),
        (["m", "--backend", "npu-async-cam"], "num_attention_ranks"),
        (["m", "--cam-ops", "cpu-twin"], "--cam-ops means nothing to --backend cpu"),
        (["m", f"{EXTRA}.dynamicQuant", "1"], "dynamicQuant means nothing to --backend cpu"),
        (["m", "--additional-config.afd.connector", "CAMAsyncAFDConnector"], "needs --backend npu-async-cam"),
        ([*CAM, "--additional-config.afd.connector", "tcp"], "npu-async-cam has no connector tcp"),
    ],
)
def test_what_does_not_belong_here_is_refused_by_name(arguments, words):
    with pytest.raises(UsageError, match=words):
        parse(arguments)


def test_attention_refuses_the_keys_without_the_connector_and_takes_them_with_it():
    block = {"role": "attention", "connector_extra_config": {"dynamicQuant": 1}}
    with pytest.raises(UsageError, match="dynamicQuant means nothing to connector auto"):
        AfdBlock.from_additional_config({"afd": block}, "attention")
    for name in ("cam", "CAMAsyncAFDConnector"):
        taken = AfdBlock.from_additional_config({"afd": {**block, "connector": name}}, "attention")
        assert taken is not None
        assert taken.transport == "cam"
    extra = {"attn_ranks_per_dp": 4}
    other = AfdBlock.from_additional_config(
        {"afd": {**block, "connector": "cam", "connector_extra_config": extra}}, "attention"
    )
    with pytest.raises(LaunchDisagreement, match="attn_ranks_per_dp is 2, the afd block says 4"):
        CamSettings.of_block(other, attention_ranks=4, tensor_parallel=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ffn_ranks": 3}, "256 experts do not divide over 3 F ranks"),
        ({"tensor_parallel": 5}, "attn_ranks_per_dp 5 does not divide 12 A ranks"),
        ({"hidden_size": 4100}, "hidden size 4100 is no multiple of 32"),
        ({"max_num_batched_tokens": 262145}, "max_num_batched_tokens is 262145"),
        ({"max_num_batched_tokens": 1, "tensor_parallel": 2}, "max_num_batched_tokens is 1"),
        ({"max_num_batched_tokens": 129, "tensor_parallel": 2}, "129 does not divide over 2 ranks"),
        ({"mega": True, "dynamic_quant": False}, "ffn_mega_moe needs dynamicQuant 1"),
        ({"mega": True, "max_num_batched_tokens": 10923}, "10923 tokens / 1 ranks x top-k 6 is above 65535"),
    ],
)
def test_numbers_that_the_operators_cannot_serve_are_refused_by_name(change, words):
    FLASH.check()
    with pytest.raises(UsageError, match=words):
        dataclasses.replace(FLASH, **change).check()


def test_mega_may_count_as_many_pairs_as_fit_sixteen_bits():
    dataclasses.replace(FLASH, mega=True, top_k=1, max_num_batched_tokens=65535).check()
    dataclasses.replace(FLASH, mega=True, tensor_parallel=2, max_num_batched_tokens=21844).check()


def test_world_ranks_and_shares_of_the_documented_shape():
    assert (FLASH.world_size, FLASH.experts_per_rank, FLASH.groups) == (16, 64, 12)
    assert [FLASH.ffn_world_rank(rank) for rank in range(4)] == [12, 13, 14, 15]
    paired = dataclasses.replace(FLASH, tensor_parallel=4)
    assert (paired.groups, paired.rows_per_rank) == (3, 2048)


def test_windows_have_the_sizes_of_the_contract():
    """Written down by hand: a(n) rounds up to 32."""
    tiny = CamShape(
        attention_ranks=4,
        ffn_ranks=2,
        num_experts=6,
        top_k=3,
        hidden_size=64,
        max_num_batched_tokens=20,
        tensor_parallel=2,
    )
    assert tiny.attention_window_bytes() == 1536 + 32 + 3840 + 32
    assert tiny.ffn_window_bytes() == 4 * (64 + 2 * 32 + 960 + 64) + 32
    wide = dataclasses.replace(tiny, dynamic_quant=False)
    assert wide.ffn_window_bytes() == 4 * (64 + 2 * 32 + 1280 + 64) + 32


def test_a_window_that_is_too_small_is_refused_by_the_name_of_its_setting():
    FLASH.check_windows("attention", 408, 1024)
    with pytest.raises(UsageError, match=r"ffn window needs \d+ bytes, LCCL_BUFFER_SIZE is 40 MiB \(set .* to 389"):
        FLASH.check_windows("ffn", 40, 4096)
    with pytest.raises(UsageError, match="hccl_buffer_size is 256 MiB"):
        FLASH.check_windows("attention", 408, 256)


@pytest.mark.parametrize(("factor", "rows"), [(1.0, 262144), (0.5, 131072), (0.1, 26214), (1e-5, 2)])
def test_a_factor_gives_the_rows_of_the_operators(factor, rows):
    assert receive_rows(factor) == rows


@pytest.mark.parametrize("factor", [0.0, -0.5, 1.5, 1e-9, float("nan")])
def test_a_factor_that_leaves_no_row_is_refused(factor):
    with pytest.raises(UsageError, match="BATCH_SIZE_FACTOR"):
        receive_rows(factor)


def test_a_factor_that_is_no_number_counts_as_one(monkeypatch, caplog):
    monkeypatch.setenv("BATCH_SIZE_FACTOR", "half")
    assert env.batch_size_factor() == 1.0
    assert "BATCH_SIZE_FACTOR='half'" in caplog.text


@given(st.integers(1, 1 << 18))
def test_one_expert_chosen_by_every_token_must_fit_a_chunk(tokens):
    shape = dataclasses.replace(FLASH, max_num_batched_tokens=tokens)
    shape.check_capacity(tokens)
    with pytest.raises(UsageError, match=f"one expert may get {tokens}"):
        shape.check_capacity(tokens - 1)
    dataclasses.replace(shape, mega=True).check_capacity(tokens - 1)
