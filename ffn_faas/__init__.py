"""ffn_faas: the routed experts of Mixture-of-Experts LLMs as a service of their own."""

from pkgutil import extend_path

__version__ = "0.1.0"

# In a clone, the source folder hides an installed package from ``python -m``; this lets it find the compiled parts.
__path__ = extend_path(__path__, __name__)
