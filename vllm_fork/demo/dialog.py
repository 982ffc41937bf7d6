"""The dialog that the demo plays, over the OpenAI HTTP API.

Each turn replays the whole conversation, assistant messages as they came, and asks
for an answer of a given length that ends by a real stop token.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_fork.demo.processes import DemoError

TURN_TIMEOUT_S: Final = 180.0

SYSTEM: Final = (
    "You help the operations team of a small observatory. Say what you know, say what "
    "you do not know, and keep to the plan that was agreed on earlier in this dialog."
)


@dataclass(frozen=True)
class Turn:
    """A question, and how many tokens its answer has, the stop token included."""

    question: str
    answer_tokens: int


# A token is a character and a block is 384 tokens: the answers cross block
# boundaries while decoding, but for the third one, which is too short to.
DIALOG: Final = (
    Turn(
        "Describe how the dome, the mount and the camera depend on each other, and "
        "what must be checked, in which order, before the first exposure of a night.",
        560,
    ),
    Turn(
        "Turn that into a checklist for a night with fast clouds: who decides, on "
        "which reading, and what is closed first?",
        700,
    ),
    Turn("And in one sentence, for the door of the control room?", 60),
    Turn(
        "Now the failures: for each of the six likeliest ones, the earliest sign of "
        "it, and what to do about it in the dark.",
        820,
    ),
    Turn("Which of these would you practise first, and how often?", 450),
)


@dataclass(frozen=True)
class TurnResult:
    """What the client saw of one turn; counts are tokens."""

    request_id: str
    prompt: int
    completion: int
    cached: int
    text: str


def play(
    base_url: str,
    session_id: str,
    turns: Sequence[Turn] = DIALOG,
    on_turn: Callable[[int, TurnResult], None] = lambda index, result: None,
) -> list[TurnResult]:
    """Play ``turns`` against the server at ``base_url`` (``http://HOST:PORT``).

    Raises:
        DemoError: the server refused a turn, or ended it otherwise than by the stop
            token at the asked length.
    """
    model = _call(f"{base_url}/v1/models", None)["data"][0]["id"]
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    results: list[TurnResult] = []
    for index, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn.question})
        answer = _call(
            f"{base_url}/v1/chat/completions",
            {
                "model": model,
                "messages": messages,
                "temperature": 0.0,
                "seed": 42,
                "session_id": session_id,
                "max_completion_tokens": turn.answer_tokens + 1,
                "vllm_xargs": {"stop_at": turn.answer_tokens},
            },
        )
        choice, usage = answer["choices"][0], answer["usage"]
        if (choice["finish_reason"], usage["completion_tokens"]) != (
            "stop",
            turn.answer_tokens,
        ):
            raise DemoError(
                f"turn {index} of {session_id} ended by {choice['finish_reason']!r} "
                f"after {usage['completion_tokens']} tokens: expected a stop after "
                f"{turn.answer_tokens}; was the server started with the demo's "
                "logits processor?"
            )
        details = usage.get("prompt_tokens_details") or {}
        result = TurnResult(
            request_id=answer["id"],
            prompt=usage["prompt_tokens"],
            completion=usage["completion_tokens"],
            cached=details.get("cached_tokens") or 0,
            text=choice["message"]["content"],
        )
        results.append(result)
        on_turn(index, result)
        messages.append({"role": "assistant", "content": result.text})
    return results


def reset_prefix_cache(base_url: str) -> bool:
    """Empty the server's prefix cache (vLLM's development API).

    False while blocks are still held: by a running request, or by a leaked pin.
    """
    return bool(_call(f"{base_url}/reset_prefix_cache", {})["success"])


def _call(url: str, body: dict[str, Any] | None) -> Any:
    """POST ``body`` as JSON, or GET where there is none; the answer's JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=TURN_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:300]
        raise DemoError(f"{url} answered {error.code}: {said}") from None
    except OSError as error:
        raise DemoError(f"{url} could not be reached: {error}") from None
