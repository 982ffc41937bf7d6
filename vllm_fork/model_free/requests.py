"""Requests for a model-free engine."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

STOP_TOKEN: Final = 7
"""The token id that ends a request with FINISHED_STOPPED."""


@cache
def _block_hasher(hash_unit: int) -> Callable[[Request], list[Any]]:
    init_none_hash(sha256)
    return get_request_block_hasher(hash_unit, sha256)


def make_request(
    request_id: str,
    prompt: Sequence[int] | None,
    *,
    max_tokens: int = 1 << 20,
    hash_unit: int = 16,
    stop_token_ids: Sequence[int] = (STOP_TOKEN,),
    **options: Any,
) -> Request:
    """A request over token ids; None: over ``prompt_embeds`` among the options.

    ``hash_unit`` (tokens) must be the scheduler's. ``options`` go to
    ``vllm.v1.request.Request`` (``cache_salt``, ``mm_features``, ``resumable``, …).
    """
    return Request(
        request_id=request_id,
        prompt_token_ids=None if prompt is None else list(prompt),
        sampling_params=SamplingParams(
            max_tokens=max_tokens, stop_token_ids=list(stop_token_ids), ignore_eos=True
        ),
        pooling_params=None,
        block_hasher=_block_hasher(hash_unit),
        **options,
    )
