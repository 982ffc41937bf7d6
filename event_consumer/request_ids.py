"""The id that a client was told, and those that the engine knows it by. Imports
nothing: for the consumer's queries and the dashboard alike.
"""

from __future__ import annotations

from typing import Final

COMPLETION: Final = "cmpl-"
"""vLLM's prefix of a ``/v1/completions`` id (``create_completion``)."""
MAX_PROMPTS: Final = 1_000
"""Prompts of one completion that are found by its id."""


def external_ids(request_id: str) -> list[str]:
    """``request_id``, and what vLLM makes of it: each prompt of a completion is a
    request of its own, ``cmpl-…-<n>``, though the answer says ``cmpl-…``.

    A list to compare with, for either database's index serves that alone.
    """
    if not request_id.startswith(COMPLETION):
        return [request_id]
    return [request_id, *(f"{request_id}-{n}" for n in range(MAX_PROMPTS))]
