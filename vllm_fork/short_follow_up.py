"""Short follow-ups: a few new tokens behind a checkpoint, prefilled in one step.

In ``align`` mode vLLM ends a prefill step at the last multiple of the hash unit before
the prompt's end, to cache the recurrent state there, and runs the 1 to ``unit`` tokens
behind it as a step of their own (``Scheduler._mamba_block_aligned_split``). Where a
turn of a conversation or an agent adds some ten tokens to its checkpoint, both steps
cost the same, and the first token comes twice as late.

What that state is good for is the very same prompt, asked again: whoever goes on with
the conversation resumes from the checkpoint of its answer. So a request that continues
a checkpoint with so few tokens runs them in one step, and leaves no state inside its
prompt. If the same prompt comes again (a retry, a sibling), attention is cached deeper
than any state: vLLM finds that a state is wanted there (``shared_prefix_boundary``),
the tokens run again, in two steps, and leave it for all that follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class ShortFollowUps:
    """Which prompts run in one step: those with at most ``most_tokens`` behind the
    checkpoint they resume from. ``unit`` and ``block_size`` in tokens."""

    most_tokens: int
    unit: int
    block_size: int

    def includes(
        self, request: Request, num_cached: int, shared_prefix_boundary: int
    ) -> bool:
        """Whether ``request``, which resumes from a checkpoint at ``num_cached``
        tokens, runs in one step where vLLM would take two.

        ``shared_prefix_boundary``: tokens that attention alone has cached of its
        prompt, where that is more; else 0.
        """
        end = request.num_prompt_tokens
        last = (end - 1) // self.unit * self.unit
        return (
            num_cached < last
            and end <= num_cached + self.most_tokens
            and shared_prefix_boundary <= num_cached
            # No step may run over the end of a block.
            and last // self.block_size == num_cached // self.block_size
        )
