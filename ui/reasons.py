"""Every reason code of the stream, in words an operator reads without a manual.

The codes are those of ``vllm_fork.events``; each has a short name for a table
cell or a chart, one sentence that says what happened, and, where the operator
can do something about it, one that says what.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Reason(NamedTuple):
    """A code in words: ``short`` for a cell, ``sentence`` and ``advice`` for a page."""

    short: str
    sentence: str
    advice: str = ""

    @property
    def in_full(self) -> str:
        """The sentence, followed by the advice where there is one."""
        return f"{self.sentence} {self.advice}".strip()


NO_CHECKPOINT: Final[dict[str, Reason]] = {
    "superseded": Reason(
        "superseded",
        "A deeper checkpoint of the same request replaced this one, so its block "
        "was given back.",
    ),
    "stopped": Reason(
        "stops not published",
        "The request ended by itself, but publish_on does not name “stop” here.",
        "Add “stop” to publish_on: it is the default.",
    ),
    "length": Reason(
        "ended by length",
        "The request hit its token limit instead of stopping by itself, and such "
        "requests do not publish here.",
        "Raise max_tokens, or add “length” to publish_on.",
    ),
    "aborted": Reason(
        "aborted",
        "The client went away, or a stop string ended the answer: both reach the "
        "engine as an abort, and aborted requests do not publish here.",
        "Prefer stop_token_ids over stop strings, or add “abort” to publish_on.",
    ),
    "error": Reason(
        "failed",
        "The request failed, so the state behind it is not trusted.",
        "The engine log says what failed.",
    ),
    "preempted": Reason(
        "preempted",
        "The scheduler took the request's blocks away for others before it finished.",
        "More KV-cache memory, or fewer concurrent requests, avoids it.",
    ),
    "unaccepted": Reason(
        "output not accepted",
        "The step that would have produced the state was scheduled, but its output "
        "was never accepted.",
    ),
    "rejected": Reason(
        "draft rejected",
        "The boundary lay inside speculative draft tokens that the model rejected.",
    ),
    "rewound": Reason(
        "rewound",
        "The request was rolled back to before the boundary, so the state no longer "
        "described its tokens.",
    ),
    "memory_pressure": Reason(
        "memory pressure",
        "A running request needed the block: a checkpoint never costs a running "
        "request anything.",
        "More KV-cache memory leaves room for checkpoints.",
    ),
    "cache_reset": Reason(
        "cache reset",
        "The prefix cache was reset while the checkpoint was held.",
    ),
    "already_cached": Reason(
        "already cached",
        "The very block was already in the prefix cache at this boundary: nothing "
        "new had to be kept, and the next turn can still reuse it.",
    ),
    "shutdown": Reason(
        "engine shut down",
        "The engine shut down before the request could publish.",
    ),
    "below_block": Reason(
        "answer too short",
        "The answer crossed no block boundary while decoding, so there was no "
        "aligned state to keep.",
        "The exact tail (on by default) keeps short answers too.",
    ),
    "never_admitted": Reason(
        "never admitted",
        "The request ended before the scheduler admitted it, so nothing was "
        "computed for it.",
    ),
    "resumable": Reason(
        "streaming input",
        "A streaming-input session drops its last sampled token when it goes on, "
        "so the state would not match.",
    ),
    "disabled": Reason(
        "retention off",
        "Retention is off on this engine: it reports what it reused and keeps "
        "nothing of the answer.",
        "Serve with `vllm-fork serve`, or set "
        "VLLM_PREFIX_CACHE_RETAIN_DECODE_CHECKPOINTS=1.",
    ),
}
"""Why a checkpoint was discarded, or a request left none."""

_UNSUPPORTED: Final[dict[str, tuple[str, str]]] = {
    "speculative": (
        "speculative decoding",
        "Speculative decoding keeps the accepted state in a scratch block.",
    ),
    "kv_connector": (
        "KV connector",
        "A KV connector reads blocks in an order for which this is not proven.",
    ),
    "prefix_caching_off": ("prefix caching off", "Prefix caching is off."),
    "no_align_mamba_groups": (
        "model not hybrid",
        "The model has no recurrent state in align mode, so there is none to keep.",
    ),
    "dense_retention": (
        "dense retention",
        "Dense retention keeps every state already: nothing is left to add.",
    ),
    "attention_kind": (
        "attention kind",
        "The model has attention other than full attention, whose tail cannot be kept.",
    ),
    "block_sizes": ("block sizes", "The model's layers have blocks of several sizes."),
    "prefix_match_unit": (
        "match unit",
        "Prefixes are looked up at block ends only: set --prefix-match-unit.",
    ),
    "copy_interval": (
        "copy interval",
        "The copy interval is not a multiple of the hash unit.",
    ),
    "resumable": (
        "streaming input",
        "A streaming-input session drops its last sampled token.",
    ),
}
UNSUPPORTED: Final = tuple(f"unsupported:{what}" for what in _UNSUPPORTED)
"""The codes of this kind that the engine is known to give."""

RETAINED: Final = Reason(
    "retained",
    "The state was published: a next turn that replays this conversation resumes "
    "from it.",
)
STILL_RUNNING: Final = Reason(
    "still running", "The request has not ended yet: what it leaves is not decided."
)
ENGINE_LOST: Final = Reason(
    "engine lost",
    "The engine died or was restarted while this request ran: its state is gone.",
    "Its log says why; the conversation starts again from its prompt.",
)
EVENTS_MISSING: Final = Reason(
    "events missing",
    "Part of the event stream was lost while this request ran, so why it left no "
    "checkpoint is not known.",
    "Stream health names the range that was lost.",
)

HIT_LIMIT: Final[dict[str, Reason]] = {
    "prompt_end": Reason(
        "end of the prompt",
        "Everything that could be reused was: the hit reached the end of what the "
        "prompt shares.",
    ),
    "recurrent_state": Reason(
        "no state deeper",
        "Attention was cached deeper, but no recurrent state was kept there, so the "
        "tokens in between were computed again.",
        "That gap is what retained checkpoints close.",
    ),
    "attention": Reason(
        "nothing deeper cached",
        "Nothing deeper was cached: the prompt is new from here on, or its blocks had "
        "left the cache.",
    ),
    "skipped": Reason(
        "cache not read",
        "The prefix cache was not read: the request asked to skip it (prompt "
        "log-probabilities do), or it is off.",
    ),
    "connector": Reason(
        "KV connector", "A KV connector brought the tokens beyond the local hit."
    ),
}
"""What kept the reuse of a prompt from going deeper."""

KIND: Final[dict[str, Reason]] = {
    "decode_block": Reason(
        "block boundary", "A block-aligned boundary crossed while decoding."
    ),
    "exact_tail": Reason(
        "exact tail", "The last executed token of the finished answer."
    ),
    "copy": Reason(
        "rolling copy", "A copy of the running state at a multiple of copy_interval."
    ),
    "prompt_replay": Reason(
        "same prompt",
        "Stock vLLM: the boundary at which the same prompt would be replayed.",
    ),
    "shared_prefix": Reason(
        "shared prefix", "Stock vLLM: a junction that several prompts share."
    ),
    "none": Reason("nothing", "Nothing was reused: the prompt was computed in full."),
}
"""What a checkpoint is, or what a prompt resumed from."""

EVICTION: Final[dict[str, Reason]] = {
    "lru": Reason(
        "cache full",
        "It was the least recently used block when the cache needed room.",
        "More KV-cache memory keeps checkpoints longer.",
    ),
    "cache_reset": Reason("cache reset", "The prefix cache was reset."),
    "replaced": Reason("replaced", "A deeper state took over its block."),
}
"""Why a published checkpoint left the cache."""

FINISH: Final[dict[str, Reason]] = {
    "stop": Reason("stop", "The model ended the answer itself."),
    "length": Reason("length", "The answer hit its token limit."),
    "abort": Reason("abort", "The client went away, or a stop string matched."),
    "error": Reason("error", "The request failed."),
    "repetition": Reason("repetition", "The engine cut off a repeating answer."),
}

STAGE: Final[dict[str, Reason]] = {
    "pinned": Reason(
        "pinned",
        "A step that completes the boundary was scheduled; its blocks are reserved.",
    ),
    "promoted": Reason(
        "promoted",
        "The step's output was accepted: this is now the request's checkpoint.",
    ),
    "published": Reason(
        "published", "In the prefix cache: a next turn can resume from it."
    ),
    "discarded": Reason("discarded", "Given back without having been published."),
    "evicted": Reason("evicted", "It was published, and has left the cache since."),
    "gone": Reason("gone", "The engine that held it is gone."),
}


def no_checkpoint(code: str) -> Reason:
    """The words for a discard or no-checkpoint code; an unknown code is shown as is."""
    if code in NO_CHECKPOINT:
        return NO_CHECKPOINT[code]
    prefix, _, what = code.partition(":")
    if prefix == "unsupported" and what:
        words = what.replace("_", " ")
        short, why = _UNSUPPORTED.get(what, (words, f"The engine names it “{words}”."))
        return Reason(f"unsupported: {short}", f"No checkpoint can be kept here. {why}")
    return _unknown(code)


def hit_limit(code: str) -> Reason:
    """The words for a ``hit_limited_by`` code."""
    return HIT_LIMIT.get(code) or _unknown(code)


def kind(code: str) -> Reason:
    """The words for a boundary or source kind."""
    return KIND.get(code) or _unknown(code)


def eviction(code: str) -> Reason:
    """The words for an eviction reason."""
    return EVICTION.get(code) or _unknown(code)


def finish(code: str) -> Reason:
    """The words for a finish reason."""
    return FINISH.get(code) or _unknown(code)


def stage(code: str) -> Reason:
    """The words for a checkpoint's stage."""
    return STAGE.get(code) or _unknown(code)


def outcome(
    status: str,
    retained_boundary: int | None,
    no_checkpoint_reason: str | None,
    incomplete: bool,
) -> Reason:
    """What a request left behind for the next turn: never empty.

    Args:
        status: ``open``, ``finished`` or ``engine_lost``.
        retained_boundary: tokens, None where nothing was published.
        no_checkpoint_reason: a code, None where not known.
        incomplete: events of this request may have been lost.
    """
    if retained_boundary is not None:
        return RETAINED
    if no_checkpoint_reason:
        return no_checkpoint(no_checkpoint_reason)
    if status == "open":
        return STILL_RUNNING
    if status == "engine_lost":
        return ENGINE_LOST
    if incomplete:
        return EVENTS_MISSING
    return Reason(
        "reason not reported",
        "The engine reported no checkpoint for this request and no reason.",
        "That is a fault of the engine: please report it with the request id.",
    )


def _unknown(code: str) -> Reason:
    return Reason(code, f"The engine gave the reason “{code}”, newer than this page.")
