"""Short follow-ups: a few new tokens behind a checkpoint, prefilled in one step.

In ``align`` mode vLLM ends a prefill step at the last multiple of the hash unit before
the prompt's end, to cache the recurrent state there, and runs the 1 to ``unit`` tokens
behind it as a step of their own (``Scheduler._mamba_block_aligned_split``). Where a
turn of a conversation or an agent adds some ten tokens to its checkpoint, both steps
cost the same and the first token comes twice as late.

What that state is good for is the very same prompt, asked again: whoever goes on with
the conversation resumes from the checkpoint of its answer. So the first request that
continues a checkpoint with so few tokens runs them in one step, and leaves no state
inside its prompt; the next one with the same prompt (a retry, a sibling) runs them
again, in two steps, and leaves it for all that follow.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

MAX_PROMPTS: Final = 4096
"""Prompts that are remembered as run in one step; the oldest is forgotten first."""


class ShortFollowUps:
    """Which prompts run in one step.

    Args:
        most_tokens: new tokens behind a checkpoint that run in one step, at most.
        unit: tokens of the hash unit.
        block_size: tokens of a block; no step runs over the end of one.
    """

    def __init__(self, most_tokens: int, unit: int, block_size: int) -> None:
        self._most_tokens = most_tokens
        self._unit = unit
        self._block_size = block_size
        # Hash of a prompt up to its last unit -> the request that ran it in one step.
        self._ran: OrderedDict[BlockHash, str] = OrderedDict()

    def admit(
        self, request: Request, num_cached: int, shared_prefix_boundary: int
    ) -> bool:
        """Whether the prompt of ``request``, which resumes from a checkpoint at
        ``num_cached`` tokens, is to run in one step; if so it is remembered.

        ``shared_prefix_boundary``: tokens that others' attention has in common with
        it; a state beyond the checkpoint is wanted there.
        """
        end = request.num_prompt_tokens
        if not num_cached < end <= num_cached + self._most_tokens:
            return False
        if request.num_tokens != end or request.resumable:
            return False
        if shared_prefix_boundary > num_cached:
            return False
        last = (end - 1) // self._unit * self._unit
        if (
            last <= num_cached
            or last // self._block_size > num_cached // self._block_size
        ):
            return False
        prompt = request.block_hashes[last // self._unit - 1]
        ran_by = self._ran.setdefault(prompt, request.request_id)
        if len(self._ran) > MAX_PROMPTS:
            self._ran.popitem(last=False)
        # A request that waits for memory is looked up in every step.
        return ran_by == request.request_id
