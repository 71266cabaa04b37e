"""F is killed and started again under two stock vLLM: no request fails and no token changes."""

from __future__ import annotations

from .demo_process import Demos


def test_f_killed_and_restarted_under_load_fails_no_request_and_changes_no_token(demos: Demos) -> None:
    figures = demos.figures("--chaos", "--eager", "--prompts", "3", "--max-tokens", "100", "--restarts", "2")
    assert figures["restarts"] == 2
    assert figures["failed_requests"] == 0
    assert figures["tokens_equal"] is True
    assert figures["tokens_compared"] >= 300
    assert figures["requests"] >= 6
    assert figures["longest_gap_s"] > 1, "F was really away"
