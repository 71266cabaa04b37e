"""The Attention side: what runs inside stock vLLM. Importing this package needs neither vllm nor torch."""
