"""What the tests' own processes of vLLM share."""

from __future__ import annotations


def look_at_classes_in_process() -> None:
    """vLLM starts a process, with all its imports, to look at each model class; here nothing is at stake."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()
