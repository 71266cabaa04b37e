"""``python -m ffn_faas demo``: a tiny real checkpoint, F, stock vLLM as Attention, and the same on stock vLLM alone."""
