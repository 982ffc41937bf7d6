"""vLLM for hybrid models that keeps the state a conversation will need again."""

__version__ = "0.1.0"
