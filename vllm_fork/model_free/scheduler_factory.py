"""Builds a vLLM scheduler over a small hybrid configuration."""

import copy
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

# Read while vLLM is imported: a replay asks no hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from vllm_fork.tiny_model import tiny_config

MAX_MODEL_LEN = 32768
NO_TRITON: Final = {
    "vllm.platforms.cpu": "Triton is not installed.",
    "vllm.config.vllm": "Model Runner V2 requires Triton;",
}
"""By logger: how its warning begins that there is no Triton; none is needed here."""


@cache
def _model_config() -> ModelConfig:
    """Costs seconds (vLLM inspects the architecture), so once a process."""
    with tempfile.TemporaryDirectory(prefix="model-free-") as directory:
        path = Path(directory, "config.json")
        path.write_text(
            json.dumps({**tiny_config(), "max_position_embeddings": MAX_MODEL_LEN})
        )
        return ModelConfig(
            model=directory,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            skip_tokenizer_init=True,
        )


def _is_worth_telling(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NO_TRITON[record.name])


@contextmanager
def _without_triton_warnings() -> Iterator[None]:
    for name in NO_TRITON:
        logging.getLogger(name).addFilter(_is_worth_telling)
    try:
        yield
    finally:
        for name in NO_TRITON:
            logging.getLogger(name).removeFilter(_is_worth_telling)


def make_scheduler(
    cls: type[Scheduler],
    *,
    block_size: int = 1056,
    hash_unit: int = 16,
    num_mamba_groups: int = 1,
    num_attention_groups: int = 1,
    num_blocks: int = 2000,
    async_scheduling: bool = False,
    num_speculative_tokens: int = 0,
    retention_interval: int | None = 0,
    enable_prefix_caching: bool = True,
    mamba_cache_mode: Literal["align", "none"] = "align",
    num_prefill_checkpoint_blocks: int = 0,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 8192,
    max_model_len: int = MAX_MODEL_LEN,
    watermark: float = 0.0,
    kv_cache_events: bool = False,
    v2_model_runner: bool = False,
    settings: Mapping[str, Any] | None = None,
    additional_config: Mapping[str, Any] | None = None,
) -> Scheduler:
    """A scheduler with its KV-cache manager, of class ``cls``.

    The attention groups come first, then the Mamba groups; all share one pool.
    The platform is not asked: with ``async_scheduling`` the configuration says so
    even where vLLM forces it off (CPU).

    Args:
        cls: ``Scheduler``, ``AsyncScheduler`` or a subclass of them.
        block_size: tokens a block, of attention and Mamba alike.
        hash_unit: tokens; granularity of prefix look-ups.
        num_blocks: blocks of the pool, the null block among them.
        retention_interval: as ``--prefix-cache-retention-interval``; None: dense.
        num_prefill_checkpoint_blocks: 1 for backends that export a sub-block
            state during prefill (Mamba2, KDA).
        v2_model_runner: let the scheduler speak to vLLM's second model runner.
        settings: the ``checkpoint_retention`` object of ``additional_config``.
    """
    if settings is not None:
        additional_config = {
            **(additional_config or {}),
            "checkpoint_retention": dict(settings),
        }
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
        watermark=watermark,
    )
    cache_config = CacheConfig(
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        mamba_cache_mode=mamba_cache_mode,
        prefix_match_unit=hash_unit,
        prefix_cache_retention_interval=retention_interval,
    )
    optional: dict[str, Any] = {}
    if num_speculative_tokens:
        optional["speculative_config"] = SpeculativeConfig(
            model="ngram",
            num_speculative_tokens=num_speculative_tokens,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
        )
    if kv_cache_events:
        optional["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="null"
        )
    if additional_config is not None:
        optional["additional_config"] = dict(additional_config)
    model_config = copy.copy(_model_config())
    model_config.max_model_len = max_model_len
    with _without_triton_warnings():
        vllm_config = VllmConfig(
            scheduler_config=scheduler_config,
            cache_config=cache_config,
            model_config=model_config,
            parallel_config=ParallelConfig(),
            **optional,
        )
    # The platform hooks run in VllmConfig.__post_init__ and know better what this
    # machine can run; nothing is run here.
    scheduler_config.async_scheduling = async_scheduling
    cache_config.block_size = block_size
    cache_config.mamba_block_size = block_size
    cache_config.mamba_cache_mode = mamba_cache_mode
    cache_config.enable_prefix_caching = enable_prefix_caching
    cache_config.num_gpu_blocks = num_blocks
    cache_config.prefix_cache_retention_interval = retention_interval

    groups = [
        KVCacheGroupSpec(
            [f"attention.{i}"],
            FullAttentionSpec(
                block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
            ),
        )
        for i in range(num_attention_groups)
    ]
    groups += [
        KVCacheGroupSpec(
            [f"mamba.{i}"],
            MambaSpec(
                block_size=block_size,
                shapes=((1, 1),),
                dtypes=(torch.float32,),
                mamba_cache_mode=mamba_cache_mode,
                num_speculative_blocks=num_speculative_tokens,
                num_prefill_checkpoint_blocks=num_prefill_checkpoint_blocks,
                prefill_checkpoint_alignment=(
                    hash_unit if num_prefill_checkpoint_blocks else None
                ),
            ),
        )
        for i in range(num_mamba_groups)
    ]
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=retention_interval,
    )
    register_all_kvcache_specs(vllm_config)
    scheduler = cls(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        block_size=block_size,
        hash_block_size=hash_unit,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(vllm_config),
    )
    scheduler.use_v2_model_runner = v2_model_runner
    return scheduler
