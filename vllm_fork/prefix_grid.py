"""Where prefixes can be found, and whether the engine will accept the settings on it.

The block size of a hybrid model is settled in the engine, once the model is loaded,
and what does not divide it (``--prefix-match-unit``) or is no multiple of it
(``--prefix-cache-retention-interval``) ends the engine there, in a traceback. The
front end and the doctor work the size out beforehand, by vLLM's own rule.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, Final

from vllm_fork.config import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

COMMON_UNIT: Final = 16
"""A hash unit in tokens that fits almost any block: kernels take multiples of it."""


def expected_block_size(config: VllmConfig) -> int | None:
    """Tokens a block of the recurrent and attention groups will have.

    Follows ``Platform.update_block_size_for_backend``, with the attention backend
    that vLLM selects for a layer of this model; layers do not exist yet. None where
    that cannot be told without them, or without the device.
    """
    try:
        return _aligned_block_size(config)
    except Exception as error:  # vLLM's own code, on a configuration half made
        logger.debug("The block size cannot be worked out: %s", error)
        return None


def _aligned_block_size(config: VllmConfig) -> int:
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import get_attn_backend

    trial = copy.copy(config)
    trial.cache_config = copy.copy(config.cache_config)
    model = trial.model_config
    with set_current_vllm_config(trial):
        backend = get_attn_backend(
            model.get_head_size(),
            model.dtype,  # type: ignore[arg-type]
            trial.cache_config.cache_dtype,
            use_mla=model.use_mla,
        )

    class PlatformWithLayers(type(current_platform)):  # type: ignore[misc]
        @classmethod
        def _find_non_ssm_backends(cls, vllm_config: Any) -> list[Any]:
            return [backend]

    PlatformWithLayers.update_block_size_for_backend(trial)
    return int(trial.cache_config.block_size)


def why_engine_refuses(config: VllmConfig) -> str | None:
    """One sentence if the engine would end at these settings; None if it would not, or
    if that cannot be told.

    Args:
        config: as the front end made it, of any model.
    """
    cache = config.cache_config
    unit = cache.prefix_match_unit
    interval = cache.prefix_cache_retention_interval
    model = config.model_config
    if not (unit or interval) or model is None or not model.is_hybrid:
        return None
    if not cache.enable_prefix_caching or cache.mamba_cache_mode != "align":
        return None
    block_size = expected_block_size(config)
    if block_size is None:
        return None
    if unit and block_size % unit:
        nearest = _divisor_up_to(block_size, unit)
        return (
            f"--prefix-match-unit {unit} does not divide the block size of "
            f"{block_size} tokens that vLLM chooses for this model: take one that "
            f"does, such as {nearest}."
        )
    step = block_size * config.parallel_config.decode_context_parallel_size
    if interval and interval % step:
        return (
            f"--prefix-cache-retention-interval {interval} is no multiple of the block "
            f"size of {step} tokens that vLLM chooses for this model: take 0, or "
            f"{(interval // step + 1) * step}."
        )
    return None


def notes(config: VllmConfig, settings: Settings, block_size: int | None) -> list[str]:
    """Sentences on what these settings give up, or what only the engine can tell."""
    cache = config.cache_config
    unit = cache.prefix_match_unit
    found: list[str] = []
    if block_size is None:
        if unit:
            found.append(
                f"--prefix-match-unit {unit} must divide the block size, which only "
                "the engine can tell for this model: it refuses the start if not "
                f"({COMMON_UNIT} fits almost any)."
            )
        if cache.prefix_cache_retention_interval:
            found.append(
                "--prefix-cache-retention-interval "
                f"{cache.prefix_cache_retention_interval} must be a multiple of the "
                "block size, which only the engine can tell for this model: it "
                "refuses the start if not."
            )
    if config.parallel_config.decode_context_parallel_size > 1:
        return found  # the attention's blocks are wider than the unit by themselves
    if unit and (block_size is None or unit < block_size):
        return found
    ends = f" (every {block_size} tokens)" if block_size else ""
    tails = " and exact tails" if settings.exact_tail else ""
    lacking = (
        f"With --prefix-match-unit {unit}, which is the whole block,"
        if unit
        else "Without --prefix-match-unit"
    )
    found.append(
        f"{lacking} a prompt is found again at block ends{ends}{tails} alone: "
        f"--prefix-match-unit {_divisor_up_to(block_size, COMMON_UNIT)} finds it in "
        "between."
    )
    if settings.copy_interval:
        found.append(
            f"No rolling copy will be made every {settings.copy_interval} tokens: "
            "copy_interval needs a --prefix-match-unit finer than the block, of which "
            "it is a multiple."
        )
    return found


def _divisor_up_to(block_size: int | None, limit: int) -> int:
    """The largest divisor of ``block_size`` that is not above ``limit``."""
    if block_size is None:
        return limit
    return next(n for n in range(min(limit, block_size), 0, -1) if not block_size % n)
