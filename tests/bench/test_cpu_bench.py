"""The CPU bench on a tiny layer: real windows, a real second process; what is reported, not how fast it is."""

import json
from pathlib import Path

import pytest

from ffn_faas.bench import cpu_shm, plot
from ffn_faas.bench.cpu_layer import LayerShape
from ffn_faas.cli import bench
from ffn_faas.errors import UsageError

TINY = ["--hidden", "64", "--inter", "32", "--experts", "8", "--top-k", "2", "--rounds", "2"]
FIELDS = {"tokens", "hidden", "experts_hit", "dispatch_us", "experts_us", "combine_us", "round_trip_us", "p99_us"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    file = tmp_path_factory.mktemp("bench") / "out.json"
    arguments = [*TINY, "--tokens", "1,40", "--sessions", "1,3", "--stages", "2", "--vs", "torch", "--json", str(file)]
    assert bench.run(arguments) == 0
    content: dict = json.loads(file.read_text())
    return content


def test_every_size_and_number_of_sessions_has_a_row_with_the_documented_fields(result: dict) -> None:
    assert [(row["sessions"], row["tokens"]) for row in result["rows"]] == [(1, 1), (1, 40), (3, 1), (3, 40)]
    for row in result["rows"]:
        assert row.keys() >= FIELDS | {"floor_us", "vs"}
        assert row["vs"].keys() == {"torch"}
        assert row["experts_hit"] == (2 if row["tokens"] == 1 else 8)
        assert 0 < row["round_trip_us"] <= row["round_trip_p90_us"] <= row["p99_us"]
    assert {"machine", "ceilings", "rows"} <= result.keys()
    assert result["ceilings"]["read_GBps"] > 0


def test_table_and_curves_show_every_row(result: dict) -> None:
    lines = cpu_shm.print_table(result).splitlines()
    assert len(lines) == 3 + len(result["rows"])
    assert "vs torch" in lines[1]
    curves = plot.lines(result)
    assert curves.keys() == {"round trip, 1 sessions", "round trip, 3 sessions", "kernel alone", "floor", "torch"}
    assert [tokens for tokens, _ in curves["round trip, 3 sessions"]] == [1, 40]


def test_the_windows_alone_are_measured_with_a_kernel_that_computes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.run([*TINY, "--moe-kernel", "zero", "--tokens", "4"]) == 0
    assert "kernel zero" in capsys.readouterr().out


def test_a_layer_has_the_flops_of_its_three_matrices() -> None:
    assert LayerShape().flops(1) == 8 * 3 * 2 * 2048 * 768


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vs", "liger"], "--vs liger is not known"),
        (["--tokens", "0"], "at least 1 is needed"),
        (["--tokens", "many"], "numbers such as 1,2"),
        (["--top-k", "9", "--experts", "8"], "more than --experts 8"),
        (["--moe-kernel", "fast"], "--moe-kernel fast is not known"),
        (["--hidden", "64,128"], "one size"),
        (["--routing", "pareto"], "--routing pareto is not known"),
        (["--json", "/nowhere/out.json"], "no such directory"),
        (["--backend", "gpu-deepep-m2n", "--plot", "x.png"], "--plot draws"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bench.run(arguments)


def test_a_plot_is_a_png(result: dict, tmp_path: Path) -> None:
    plot.plot(result, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
