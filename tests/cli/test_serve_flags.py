"""The serve command line: vLLM's spelling, launch agreement, refusals."""

import pytest

from ffn_faas.cli import main
from ffn_faas.cli.serve import parse
from ffn_faas.cli.vllm_flags import normalize
from ffn_faas.errors import LaunchDisagreement, UsageError


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_underscores_and_dashes_are_the_same_flag():
    config, _ = parse(["m", "--max_num_batched_tokens", "128"])
    assert config.max_num_batched_tokens == 128


def test_dotted_json_is_gathered_as_vllm_does():
    arguments = ["--additional-config.afd.role", "ffn", "--additional_config.afd.num_ffn_ranks=1"]
    assert normalize(arguments) == ["--additional-config", '{"afd": {"role": "ffn", "num_ffn_ranks": 1}}']


def test_a_later_dotted_value_wins_over_an_earlier_object():
    arguments = ["--additional-config", '{"afd": {"port": 1, "role": "ffn"}}', "--additional-config.afd.port", "2"]
    assert normalize(arguments) == ["--additional-config", '{"afd": {"port": 2, "role": "ffn"}}']


def test_vllm_flags_without_meaning_are_accepted_and_named():
    config, ignored = parse(["--trust-remote-code", "--max-model-len", "4096", "m", "--served-model-name=x"])
    assert config.model == "m"
    assert ignored == ["--trust-remote-code", "--max-model-len", "--served-model-name"]


def test_an_environment_setting_is_used_and_the_flag_wins_over_it(monkeypatch):
    monkeypatch.setenv("FFN_FAAS_PORT", "8200")
    monkeypatch.setenv("FFN_FAAS_LOG_JSON", "1")
    assert parse(["m"])[0].port == 8200
    assert parse(["m"])[0].log_json is True
    assert parse(["m", "--port", "8300"])[0].port == 8300


def test_local_rank_r_listens_on_port_plus_r(monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    config, _ = parse(["m", "--port", "9000"])
    assert config.listen_port == 9001
    assert list(config.world.local_ranks) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["m", "--data-parallel-size", "3"], ["WORLD_SIZE=1", "--data-parallel-size=3"]),
        (["m", "--additional-config.afd.num_ffn_ranks", "2"], ["WORLD_SIZE=1", "afd.num_ffn_ranks=2"]),
        (["m", "--additional-config.afd.role", "attention"], ["'attention'", "'ffn'"]),
        (["m", "--tensor-parallel-size", "2"], ["--tensor-parallel-size is 2", "1"]),
        (["m", "-pp", "4"], ["--pipeline-parallel-size is 4", "1"]),
        (["m", "--enable-eplb"], ["--enable-eplb"]),
        (["m", "--enable-elastic-ep"], ["--enable-elastic-ep"]),
        (["m", "--eplb-config.num_redundant_experts", "2"], ["2 redundant experts"]),
    ],
)
def test_a_launch_that_contradicts_itself_exits_3_and_names_both_values(arguments, values, capsys):
    with pytest.raises(LaunchDisagreement):
        parse(arguments)
    assert main(["serve", *arguments]) == 3
    error = capsys.readouterr().err
    for value in values:
        assert value in error


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["m", "--afd-config", "{}"], ["--afd-config", "--additional-config"]),
        (["m", "--additional-config.afd.afd_role", "ffn"], ["afd.afd_role", "use instead: role"]),
        (["m", "--additional-config.afd.num_ffn_servers", "1"], ["afd.num_ffn_servers", "num_ffn_ranks"]),
        (["m", "--additional-config.afd.colour", "1"], ["afd.colour", "known keys"]),
        (["m", "--additional-config.afd.connector_extra_config.colour", "1"], ["connector_extra_config.colour"]),
        (["m", "--additional-config.afd.connector", "CAMAsyncAFDConnector"], ["npu-async-cam"]),
        (["m", "--additional-config.afd.connector", "nonsense"], ["nonsense", "shm"]),
        (["m", "--additional-config.afd.compute_gate_on_attention", "false"], ["compute_gate_on_attention"]),
        (["m", "--additional-config", "{bad"], ["not valid JSON", "{bad"]),
        (["m", "--additional-config", "[]"], ["must be a JSON object"]),
        (["m", "--additional-config"], ["needs a value"]),
        ([], ["no MODEL"]),
        (["m", "--model", "n"], ["'m'", "'n'"]),
        (["m", "--max-num-batched-tokens", "0"], ["--max-num-batched-tokens is 0"]),
        (["m", "--port", "0"], ["--port 0"]),
        (["m", "--item-limit", "0"], ["--item-limit is 0"]),
        (["m", "--window-memory", "lots"], ["lots"]),
    ],
)
def test_a_wrong_command_line_exits_2_and_says_what_replaces_it(arguments, values, capsys):
    with pytest.raises(UsageError):
        parse(arguments)
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    for value in values:
        assert value in error


def test_the_help_teaches_by_example(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for needed in ("torchrun --nproc-per-node", "--load-format ffn_faas", "exit codes"):
        assert needed in text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "example.org"])
def test_an_address_that_others_reach_needs_a_token(monkeypatch, tmp_path, host):
    monkeypatch.delenv("FFN_FAAS_TOKEN", raising=False)
    with pytest.raises(UsageError, match=r"a token is needed .*FFN_FAAS_TOKEN"):
        parse(["m", f"--host={host}"])
    monkeypatch.setenv("FFN_FAAS_TOKEN", "of-the-environment")
    assert parse(["m", f"--host={host}"])[0].token == "of-the-environment"
    (tmp_path / "token").write_text("of-the-file\n")
    assert parse(["m", f"--host={host}", "--token-file", str(tmp_path / "token")])[0].token == "of-the-file"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_address_needs_none(monkeypatch, host):
    monkeypatch.delenv("FFN_FAAS_TOKEN", raising=False)
    assert parse(["m", "--host", host])[0].token is None


def test_a_token_that_cannot_stand_in_a_header_is_a_usage_error(monkeypatch):
    monkeypatch.setenv("FFN_FAAS_TOKEN", "two words")
    with pytest.raises(UsageError, match="FFN_FAAS_TOKEN holds no usable token"):
        parse(["m"])


def test_a_key_without_a_certificate_is_a_usage_error():
    with pytest.raises(UsageError, match="--ssl-certfile"):
        parse(["m", "--ssl-keyfile", "key.pem"])
