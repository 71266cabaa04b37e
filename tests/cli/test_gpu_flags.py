"""Flags of the GPU backend, and the command line of ``bench``."""

import pytest

from ffn_faas.cli import bench, main, serve
from ffn_faas.errors import UsageError


def config(*flags):
    return serve.parse(["m", *flags])[0]


def test_device_ids_are_indices_of_gpus():
    assert config("--device-ids", "4,6").device_ids == (4, 6)
    assert config().device_ids == ()
    with pytest.raises(UsageError, match="indices of GPUs"):
        config("--device-ids", "GPU-1")


@pytest.mark.parametrize(
    ("flags", "eager"),
    [
        ([], False),
        (["--enforce-eager"], True),
        (["--compilation-config", '{"cudagraph_mode": "FULL"}'], False),
        (["--compilation-config", '{"cudagraph_mode": "NONE"}'], True),
        (["--compilation-config.cudagraph_mode", "FULL_DECODE_ONLY"], False),
    ],
)
def test_graphs_are_on_unless_asked_otherwise(flags, eager):
    assert config(*flags).enforce_eager is eager


def test_an_unknown_graph_mode_is_refused():
    with pytest.raises(UsageError, match="PIECEWISE"):
        config("--compilation-config", '{"cudagraph_mode": "PIECEWISE"}')


def test_bench_refuses_a_hidden_size_without_a_shape(capsys):
    assert main(["bench", "--backend", "gpu-deepep-m2n", "--hidden", "1000"]) == 2
    assert "one of 2048, 4096, 7168" in capsys.readouterr().err


def test_bench_explains_itself_without_a_gpu(capsys):
    with pytest.raises(SystemExit):
        bench.run(["--help"])
    assert "--one-gpu" in capsys.readouterr().out
