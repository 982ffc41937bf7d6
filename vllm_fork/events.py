"""The wire schema of the checkpoint stream: what is published, and what is read.

This module imports msgspec alone, so that a consumer never needs vLLM or torch.

Frames are vLLM's own (``vllm.distributed.kv_events``): ``[topic, seq, payload]``
with ``seq`` an 8-byte big-endian unsigned integer that counts batches from 0 in
one engine epoch. ``payload`` is one :class:`EventBatch`, a msgpack array whose
first three elements are those of vLLM's ``EventBatch``; its events are maps
tagged by ``type``.

Compatibility: fields and event types are only ever added. A reader skips fields
it does not know, and :func:`decode_batch` skips, and counts, events whose tag it
does not know or that do not decode, so that one of them never costs its batch.

Never on the wire: token ids and text.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, NamedTuple

import msgspec

SCHEMA_VERSION: Final = 1
"""Raised when a field changes its meaning. Additions do not raise it."""

DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:5567"
DEFAULT_REPLAY_ENDPOINT: Final = "tcp://127.0.0.1:5568"
DEFAULT_TOPIC: Final = "kv-checkpoints"

SEQ_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
"""The sequence frame that ends a replay (vLLM's ``ZmqEventPublisher.END_SEQ``)."""

MAX_SESSION_ID_CHARS: Final = 256

# Boundary kinds: what a checkpoint (or the source of a reuse) is.
DECODE_BLOCK: Final = "decode_block"
"""A block-aligned boundary crossed while decoding (vLLM PR 50551)."""
EXACT_TAIL: Final = "exact_tail"
"""The last executed token of a finished request; need not be on the hash grid."""
COPY: Final = "copy"
"""A copy of the running state at a multiple of ``copy_interval``."""
PROMPT_REPLAY: Final = "prompt_replay"
"""Stock vLLM: the boundary at which the same prompt would be replayed."""
SHARED_PREFIX: Final = "shared_prefix"
"""Stock vLLM: a junction that several prompts share (Marconi admission)."""
NONE: Final = "none"
"""Nothing was reused."""

CHECKPOINT_KINDS: Final = (DECODE_BLOCK, EXACT_TAIL, COPY)
SOURCE_KINDS: Final = (PROMPT_REPLAY, SHARED_PREFIX, *CHECKPOINT_KINDS, NONE)

DISCARD_REASONS: Final = (
    "superseded",  # a deeper checkpoint of the same request was promoted
    "stopped",  # the request stopped, and publish_on does not name that
    "length",  # the request ended by length, and publish_on does not name it
    "aborted",  # the client went away, or a stop *string* ended it
    "error",
    "preempted",
    "unaccepted",  # scheduled, but the step's output was never accepted
    "rejected",  # speculative drafts across the boundary were rejected
    "rewound",  # the request's executed tokens fell below the boundary
    "memory_pressure",  # given back so that no running request is preempted
    "cache_reset",
    "already_cached",  # the very block already served this boundary
    "shutdown",
)

HIT_LIMITS: Final = (
    "prompt_end",  # everything reusable was reused
    "recurrent_state",  # attention was cached deeper than the recurrent state
    "attention",  # nothing deeper was cached: new text, or evicted blocks
    "skipped",  # the request asked not to read the prefix cache, or it is off
    "connector",  # a KV connector brought the rest
)

EVICTION_REASONS: Final = ("lru", "cache_reset", "replaced")

# What a reader's database takes: an event with a number beyond is not decoded.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Tokens, blocks, and other things that fit 32 bits."""
BigCount = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Event(
    msgspec.Struct,
    tag=True,
    tag_field="type",
    kw_only=True,
    omit_defaults=True,
    gc=False,
):
    """Base of every event.

    ``time_unix_ns`` is the wall clock of the engine process, ``monotonic_ns`` its
    monotonic clock: order and durations within one engine epoch come from the
    latter, which no clock adjustment moves.
    """

    time_unix_ns: Nanoseconds
    monotonic_ns: Nanoseconds


class RequestEvent(Event, kw_only=True):
    """Base of the events that belong to one request.

    ``request_id`` is the engine core's (``<external>-<8 hex>``);
    ``external_request_id`` the one that the client and vLLM's own span know.
    ``session_id`` is capped at :data:`MAX_SESSION_ID_CHARS` characters.
    """

    request_id: str
    external_request_id: str | None = None
    session_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


class CheckpointEvent(RequestEvent, kw_only=True):
    """Base of the stages of one checkpoint's life.

    ``checkpoint_id`` is unique in an engine epoch. ``boundary`` (tokens): the
    checkpoint is the exact recurrent state after tokens ``[0, boundary)``.
    ``boundary_kind`` is one of :data:`CHECKPOINT_KINDS`.
    """

    checkpoint_id: BigCount
    boundary: Count
    boundary_kind: str


class CheckpointPinned(CheckpointEvent, kw_only=True):
    """A step that completes ``boundary`` was scheduled and its blocks are reserved.

    ``num_blocks``: blocks that the pin holds, one a Mamba group; ``block_ids``
    in the order of those groups.
    """

    num_blocks: Count
    block_ids: list[Count] = []


class CheckpointPromoted(CheckpointEvent, kw_only=True):
    """The step's output was accepted: this is now *the* request's checkpoint."""

    supersedes_boundary: Count | None = None
    supersedes_checkpoint_id: BigCount | None = None


class CheckpointPublished(CheckpointEvent, kw_only=True):
    """The hash is in the prefix cache for every group; the pin is released."""

    finish_reason: str | None = None
    block_hash: bytes | int | None = None
    """As vLLM's ``BlockStored`` announces it; None for a boundary off the grid."""


class CheckpointDiscarded(CheckpointEvent, kw_only=True):
    """The pin was released without publication: one of :data:`DISCARD_REASONS`."""

    reason: str


class CheckpointEvicted(CheckpointEvent, kw_only=True):
    """A published checkpoint left the prefix cache.

    The request fields name the request that published it. ``age_s``: seconds
    since publication. ``num_hits``: admissions that resumed from it.
    ``reason`` is one of :data:`EVICTION_REASONS`.
    """

    reason: str
    age_s: float
    num_hits: Count = 0


class PrefixReused(RequestEvent, kw_only=True):
    """A request was admitted with ``num_cached_tokens`` of its prompt reused.

    One an admission. ``resumed``: a re-admission after a preemption, which reuse
    figures leave out. ``num_external_tokens``: tokens that a KV connector brought,
    not counted in ``num_cached_tokens``. ``hit_limited_by`` is one of
    :data:`HIT_LIMITS`; ``shared_prefix_boundary`` (tokens) is how deep attention
    alone would have matched, where known. ``source_*`` name the checkpoint that
    was resumed from, where the hit was one of ours.
    """

    num_prompt_tokens: Count
    num_cached_tokens: Count
    num_external_tokens: Count = 0
    resumed: bool = False
    hit_limited_by: str | None = None
    shared_prefix_boundary: Count | None = None
    source_kind: str = NONE
    source_request_id: str | None = None
    source_external_request_id: str | None = None
    source_checkpoint_id: BigCount | None = None
    source_boundary: Count | None = None
    arrival_unix_ns: Nanoseconds | None = None


class RequestFinished(RequestEvent, kw_only=True):
    """A request ended. Sent for every request, also one never admitted.

    ``num_cached_tokens`` is that of its first admission. ``retained_boundary``
    (tokens) is the deepest boundary it left in the prefix cache by publishing;
    when None, ``no_checkpoint_reason`` says why: a discard reason, ``below_block``
    (no boundary was crossed while decoding), ``never_admitted``, ``resumable``,
    ``disabled`` or ``unsupported:<what>``.
    """

    num_prompt_tokens: Count
    num_output_tokens: Count
    num_cached_tokens: Count
    finish_reason: str
    num_preemptions: Count = 0
    num_superseded: Count = 0
    retained_boundary: Count | None = None
    retained_kind: str | None = None
    no_checkpoint_reason: str | None = None
    stop_reason: str | int | None = None
    arrival_unix_ns: Nanoseconds | None = None


class EngineStarted(Event, kw_only=True):
    """First event of an engine epoch.

    ``retention``: ``on``, or ``off``, with ``retention_reason`` then in words.
    ``block_size`` and ``hash_unit`` in tokens; ``num_blocks`` of the pool;
    ``num_mamba_groups``: blocks a checkpoint holds.
    """

    vllm_version: str
    fork_version: str
    retention: str
    retention_reason: str | None = None
    exact_tail: str = "off"
    copy_interval: Count = 0
    publish_on: list[str] = []
    block_size: Count | None = None
    hash_unit: Count | None = None
    num_blocks: Count | None = None
    num_mamba_groups: Count = 0
    async_scheduling: bool | None = None


class EngineStopped(Event, kw_only=True):
    """The engine shut down in order: nothing follows in this epoch."""


class EventsDropped(Event, kw_only=True):
    """``count`` events never reached the stream: the publisher's queue was full,
    or they failed to encode (``num_encode_errors`` of them)."""

    count: BigCount
    num_encode_errors: BigCount = 0


AnyEvent = (
    CheckpointPinned
    | CheckpointPromoted
    | CheckpointPublished
    | CheckpointDiscarded
    | CheckpointEvicted
    | PrefixReused
    | RequestFinished
    | EngineStarted
    | EngineStopped
    | EventsDropped
)


class EventBatch(msgspec.Struct, array_like=True, kw_only=False, gc=False):
    """One payload: vLLM's three fields, then ours.

    ``ts``: wall-clock seconds at which the batch was made. A batch with
    ``heartbeat`` set has no events; its frame repeats the sequence number of the
    *last real batch*, so that a consumer can see a loss at the end of a quiet
    stream. It is never applied, and never replayed.
    """

    ts: float
    events: list[Any]
    data_parallel_rank: Count | None = None
    schema_version: Count = SCHEMA_VERSION
    engine_id: str = ""
    """A UUID drawn at engine start: the epoch."""
    label: str = ""
    """What the operator calls this engine (``arm-off``, ``prod-3``)."""
    model_name: str = ""
    heartbeat: bool = False


class DecodedBatch(NamedTuple):
    """A batch as read: its header, the events that decoded, and what did not."""

    batch: EventBatch
    events: list[AnyEvent]
    num_unknown: int
    """Events whose tag this version does not know."""
    errors: list[str]
    """One sentence for each event that did not decode."""


class _RawBatch(EventBatch, array_like=True, gc=False):
    """An :class:`EventBatch` whose events are left encoded."""

    events: list[msgspec.Raw]


class _Tag(msgspec.Struct):
    type: str = ""


class BatchDecoder:
    """Decodes payloads. Not thread-safe; keep one a thread."""

    KNOWN_TAGS: ClassVar[frozenset[str]] = frozenset(
        t.__struct_config__.tag for t in AnyEvent.__args__
    )

    def __init__(self) -> None:
        self._fast = msgspec.msgpack.Decoder(_TypedBatch)
        self._raw = msgspec.msgpack.Decoder(_RawBatch)
        self._event = msgspec.msgpack.Decoder(AnyEvent)
        self._tag = msgspec.msgpack.Decoder(_Tag)

    def decode(self, payload: bytes) -> DecodedBatch:
        """Read one payload.

        Raises:
            msgspec.DecodeError: the payload is not a batch at all (a foreign or
                corrupt frame). A bad event inside a batch raises nothing.
        """
        try:
            batch = self._fast.decode(payload)
            return DecodedBatch(batch, batch.events, 0, [])
        except msgspec.ValidationError:
            pass
        raw = self._raw.decode(payload)
        events: list[AnyEvent] = []
        errors: list[str] = []
        num_unknown = 0
        for item in raw.events:
            try:
                events.append(self._event.decode(item))
                continue
            except msgspec.DecodeError as error:
                reason = str(error)
            try:
                tag = self._tag.decode(item).type
            except msgspec.DecodeError:
                tag = ""
            if tag and tag not in self.KNOWN_TAGS:
                num_unknown += 1
            else:
                errors.append(f"{tag or 'event without a type'}: {reason}")
        return DecodedBatch(raw, events, num_unknown, errors)


class _TypedBatch(EventBatch, array_like=True, gc=False):
    events: list[AnyEvent]


def decode_batch(payload: bytes) -> DecodedBatch:
    """:meth:`BatchDecoder.decode` with a decoder of its own."""
    return BatchDecoder().decode(payload)


def seq_to_bytes(seq: int) -> bytes:
    """The sequence frame of batch ``seq`` (-1: :data:`END_OF_REPLAY`)."""
    return seq.to_bytes(SEQ_BYTES, "big", signed=True)


def seq_from_bytes(frame: bytes) -> int:
    """Inverse of :func:`seq_to_bytes`.

    Raises:
        ValueError: the frame has not :data:`SEQ_BYTES` bytes.
    """
    if len(frame) != SEQ_BYTES:
        raise ValueError(f"a sequence frame has {SEQ_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)
