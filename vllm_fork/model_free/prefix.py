"""What a prefix leaves in a cache, as one integer."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.v1.request import Request


def prefix_hashes(
    inputs: Iterable[Hashable], seed: Hashable = None
) -> NDArray[np.int64]:
    """Hash every prefix of ``inputs``, one a position.

    Element ``n`` stands for the recurrent state after ``inputs[:n]``, and for the
    key and value of position ``n - 1``: both depend on the whole prefix. ``seed``
    is what the model adds to every position.
    """
    value = hash(("prefix", seed))
    values = [value]
    for item in inputs:
        value = hash((value, item))
        values.append(value)
    return np.array(values, dtype=np.int64)


def whole_input(request: Request) -> Hashable:
    """What separates all of a request from another one: salt and adapter."""
    adapter = request.lora_request
    return request.cache_salt, adapter and (adapter.lora_name, adapter.lora_path)


def model_inputs(request: Request, tokens: Sequence[int]) -> list[Hashable]:
    """What the model reads at each position of ``tokens``: a token id, a row of an
    image's embeddings, or a row of the prompt's."""
    inputs: list[Hashable] = list(tokens)
    if request.prompt_embeds is not None:
        is_token = request.prompt_is_token_ids or [False] * request.num_prompt_tokens
        for i, row in enumerate(request.prompt_embeds):
            if not is_token[i]:
                inputs[i] = row.numpy().tobytes()
    for feature in request.mm_features:
        first, length = feature.mm_position.offset, feature.mm_position.length
        inputs[first : first + length] = [
            (feature.identifier, i) for i in range(length)
        ]
    return inputs
