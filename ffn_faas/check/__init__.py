"""``python -m ffn_faas check``: what serving a model would take, and what would be refused, without loading it."""
