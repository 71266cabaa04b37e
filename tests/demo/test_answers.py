"""Stock answers are used again only where they fit."""

from __future__ import annotations

from pathlib import Path

from ffn_faas.demo.answers import Answer, ServedRun, fingerprint, load_run, save_run

RUN = ServedRun([Answer("p", "t", [1, 2], [-0.1, -0.2], [{"token_id:1": -0.1}, {"token_id:2": -0.2}], 0.5)], 3.0, 10, 9)


def test_a_kept_run_comes_back_under_its_fingerprint_only(tmp_path: Path) -> None:
    path = tmp_path / "stock.json"
    save_run(path, fingerprint({"seed": 0}), RUN)
    assert load_run(path, fingerprint({"seed": 0})) == RUN
    assert load_run(path, fingerprint({"seed": 1})) is None


def test_a_missing_or_broken_file_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "stock.json"
    assert load_run(path, "key") is None
    path.write_text('{"fingerprint": "key", "run": {"answers": [{}]}}')
    assert load_run(path, "key") is None


def test_tokens_per_second_leave_out_the_start() -> None:
    assert RUN.tokens_per_s == 4.0
