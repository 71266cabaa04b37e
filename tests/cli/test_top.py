"""``top``: rates from totals, lines of a terminal, a terminal that is left as it was found."""

from __future__ import annotations

import io
import json

import pytest

from ffn_faas import cli
from ffn_faas.cli import top
from ffn_faas.errors import ResourceError
from ffn_faas.http.server import TlsFiles
from ffn_faas.telemetry.rates import Rates
from ffn_faas.telemetry.terminal import Look, draw
from tests.certificates import self_signed
from tests.http.conftest import Service
from tests.service.daemon import free_port


def status(at, steps, rank=0, **changes):
    """What /node says of a rank at second ``at`` of its life, each step 10 rows, 2 ms of computing, 1 ms of sending."""
    times = {"wait_s": 0.004 * steps, "compute_s": 0.002 * steps, "post_s": 0.001 * steps}
    return {
        "rank": rank,
        "phase": "ready",
        "progress": 1.0,
        "model": "some/model",
        "phase_seconds": {"starting": 1.0, "ready": at - 1.0},
        "steps": {"steps": steps, "rows": 10 * steps, **times},
        "sessions": [],
        "weights_bytes": 3 << 20,
        "window_bytes": 1024,
    } | changes


def test_rates_are_those_of_the_last_seconds():
    rates = Rates()
    assert rates.now() is None
    for second in range(10):
        rates.add(status(10 + second, 0 if second < 6 else 100 * (second - 6)))
    now = rates.now()
    assert now["steps_per_s"] == pytest.approx(100)
    assert now["rows_per_s"] == pytest.approx(1000)
    assert now["compute_s"] == pytest.approx(0.002)
    assert now["busy"] == pytest.approx(0.3)


def test_a_restarted_f_starts_anew_and_an_idle_one_has_no_time_per_step():
    rates = Rates()
    rates.add(status(100, 5000))
    rates.add({"rank": 0, "unreachable": "gone"})
    rates.add(status(2, 7))
    assert rates.now() is None
    rates.add(status(3, 7))
    assert rates.now()["steps_per_s"] == 0
    assert "compute_s" not in rates.now()


def test_every_rank_has_a_line_also_one_that_does_not_answer():
    ranks = [status(5, 1), {"rank": 1, "unreachable": "port 8101 does not answer: refused"}]
    lines = draw(Look(ranks, {0: None}), 110, 40, color=False)
    assert any(line.split()[:2] == ["0", "ready"] for line in lines)
    assert any(line.split()[:2] == ["1", "unreachable"] for line in lines)
    assert "F rank 1: port 8101 does not answer: refused" in lines
    assert "tokens per expert: not counted" in lines


def test_experts_of_all_ranks_stand_side_by_side_and_fit_the_terminal():
    ranks = [status(5, 1, expert_rows=[[0, 16], [1, 1]]), status(5, 1, rank=1, expert_rows=[[4], [1]])]
    lines = draw(Look(ranks, {}), 80, 40, color=False)
    # Square roots of 0, 16, 4 over 16 are 0, 1, 1/2; the hottest layer has 16 of 20 in one of three experts.
    assert lines[-2:] == ["   0  █▒", "   1 ░░░"]
    assert lines[-3].endswith("2.40 at most")
    wide = [status(5, 1, expert_rows=[[1] * 1000] * 100)]
    for width, height in ((40, 20), (80, 24), (200, 60)):
        lines = draw(Look(wide, {}), width, height, color=False)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width


def test_once_says_by_its_exit_code_whether_all_are_ready(capsys):
    service = Service()
    try:
        url = f"http://127.0.0.1:{service.port}"
        assert cli.main(["top", url, "--once", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["ranks"][0]["phase"] == "starting"
        service.to_ready()
        assert cli.main(["top", url.removeprefix("http://"), "--once", "--interval", "0.1"]) == 0
        assert "No" not in capsys.readouterr().out
    finally:
        service.server.shutdown()


def test_nobody_there_is_exit_code_6_with_the_address(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert cli.main(["top", url, "--once"]) == 6
    assert url in capsys.readouterr().err


def test_over_tls_the_certificate_is_checked_against_the_authorities_given(tmp_path, capsys):
    certificate, key = map(str, self_signed(tmp_path))
    service = Service(tls=TlsFiles(certificate, key))
    try:
        service.to_ready()
        url = f"https://127.0.0.1:{service.port}"
        once = ["top", url, "--once", "--json"]
        assert cli.main([*once, "--ssl-ca-certs", certificate]) == 0
        assert cli.main(once) == 6
        assert "certificate" in capsys.readouterr().err
        assert cli.main([*once, "--ssl-ca-certs", str(tmp_path / "none.pem")]) == 2
    finally:
        service.server.shutdown()


@pytest.mark.parametrize("arguments", [["ftp://there"], ["--interval", "0"], ["--interval", "nan"]])
def test_what_makes_no_sense_is_a_usage_error(arguments):
    assert cli.main(["top", "--once", *arguments]) == 2


def test_watching_goes_on_while_f_is_away_and_leaves_the_terminal_as_it_was():
    looks = iter([[status(5, 1)], ResourceError("F does not answer"), [status(1, 0)], KeyboardInterrupt()])

    def ask():
        look = next(looks)
        if isinstance(look, BaseException):
            raise look
        return look

    out = io.StringIO()
    top._watch(ask, 0.01, out)
    assert "F does not answer; waiting for it" in out.getvalue()
    assert out.getvalue().startswith(top.ENTER)
    assert out.getvalue().endswith(top.LEAVE)
