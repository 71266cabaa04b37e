"""However a process of the demo dies, the demo ends with the reason and nothing is left."""

from __future__ import annotations

import signal

import pytest

from .demo_process import PATIENCE_S, Demos

LONG = ("--eager", "--skip-stock", "--moe-kernel", "torch", "--prompts", "40", "--max-tokens", "60")
VICTIMS = {
    "F rank": (("-m ffn_faas serve", "--port"), "F ended"),
    "Attention worker": (("VLLM::Worker",), "Attention"),
    "Attention API server": (("vllm.entrypoints.openai.api_server",), "Attention ended with signal SIGKILL"),
}


@pytest.mark.parametrize(
    "victim", ["F rank", *(pytest.param(name, marks=pytest.mark.large) for name in VICTIMS if name != "F rank")]
)
def test_kill_9_of_one_process_ends_the_demo_with_the_reason(demos: Demos, victim: str) -> None:
    words, reason = VICTIMS[victim]
    with demos.running(*LONG, "--ffn-ranks", "2") as demo:
        demo.wait_for("Attention: answer 1 of")
        demo.find(*words).kill()
        assert demo.process.wait(PATIENCE_S) == 1
        assert reason in demo.log()


def test_kill_9_of_the_demo_takes_all_it_started_along(demos: Demos) -> None:
    with demos.running(*LONG, "--ffn-ranks", "2") as demo:
        demo.wait_for_process("VLLM::Worker")
        demo.process.kill()


def test_ctrl_c_while_attention_starts_leaves_nothing(demos: Demos) -> None:
    with demos.running(*LONG) as demo:
        demo.wait_for("Attention: starting, 10 s")
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(60) == 130
