"""Whether decode checkpoints can be retained with a given vLLM configuration.

The one table that the front end, the engine and ``vllm-fork doctor`` decide by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Decision(NamedTuple):
    """``on``; ``off``: nothing to retain, the server runs all the same; ``refused``:
    the model could, but a setting prevents it. ``reason``: one sentence, unless on.
    """

    retention: Literal["on", "off", "refused"]
    reason: str | None


def decide(vllm_config: VllmConfig) -> Decision:
    """Look the configuration up (DESIGN: overlay on vLLM)."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    if model is None:
        return Decision("off", "No model is configured, so there is no state to keep.")
    if not model.is_hybrid:
        return Decision(
            "off",
            f"{model.architecture} is not a hybrid model (recurrent and attention "
            "layers), so it has no recurrent state to keep: vLLM's own prefix cache "
            "already reuses everything.",
        )
    if model.runner_type != "generate":
        return Decision(
            "off",
            f"{model.architecture} runs as a {model.runner_type} model, which decodes "
            "nothing, so there is no state to keep.",
        )
    if cache.use_replayssm:
        return Decision(
            "refused",
            "Decode checkpoints cannot be retained with --use-replayssm, whose blocks "
            "hold recent inputs in place of the state: remove the flag.",
        )
    if not cache.enable_prefix_caching:
        return Decision(
            "refused",
            "Decode checkpoints are kept in the prefix cache, which is off: remove "
            "--no-enable-prefix-caching, or start with "
            "VLLM_PREFIX_CACHE_RETAIN_DECODE_CHECKPOINTS=0.",
        )
    if cache.mamba_cache_mode != "align":
        return Decision(
            "refused",
            "Decode checkpoints need --mamba-cache-mode align, not "
            f"{cache.mamba_cache_mode}.",
        )
    if cache.prefix_cache_retention_interval is None:
        return Decision(
            "refused",
            "Decode checkpoints are for sparse retention, and "
            "--prefix-cache-retention-interval None keeps every state densely: set it "
            "to 0.",
        )
    return Decision("on", None)
