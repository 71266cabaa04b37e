"""ffn_faas: the routed experts of Mixture-of-Experts LLMs as a service of their own."""

__version__ = "0.1.0"
