"""Entry point of group ``vllm.general_plugins``; vLLM calls ``register`` in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Offer the remote routed-experts layer and the ``ffn_faas`` load format to vLLM.

    Both delegate to vLLM's own code unless ``--additional-config`` holds an ``afd`` block of role ``attention``.
    Opens no connection: the process may fork afterwards. Idempotent.
    """
    from ffn_faas.attention import compat, orphan

    orphan.mark_first_process()
    compat.register_with_vllm()
