"""The stages of a request and of its checkpoints, as OTLP log records.

One record a stage, with ``event_name``, the time of the event, and the ids of the
span that it belongs to: what OpenTelemetry puts in place of span events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from opentelemetry.proto.logs.v1.logs_pb2 import SEVERITY_NUMBER_INFO, LogRecord

from event_consumer import names
from event_consumer.otlp_attributes import set_attributes
from event_consumer.records import CheckpointRecord, RequestRecord


class Stage(NamedTuple):
    """One event of a life: its name, its time, and what it says."""

    name: str
    time_ns: int
    attributes: dict[str, Any]
    body: str


def request_stages(request: RequestRecord) -> Iterator[Stage]:
    """The admission."""
    if request.admitted_ns is not None:
        yield Stage(
            names.REUSED,
            request.admitted_ns,
            {
                names.REUSE_DEPTH: request.num_cached_tokens,
                names.HIT_LIMITED_BY: request.hit_limited_by,
                names.SOURCE_KIND: request.source_kind,
            },
            f"reused {request.num_cached_tokens} of {request.num_prompt_tokens} "
            f"prompt tokens",
        )


def checkpoint_stages(checkpoint: CheckpointRecord) -> Iterator[Stage]:
    """What happened to a checkpoint, in order."""
    at = f"checkpoint {checkpoint.checkpoint_id} at token {checkpoint.boundary}"
    known = {
        names.CHECKPOINT_ID: checkpoint.checkpoint_id,
        names.BOUNDARY: checkpoint.boundary,
        names.BOUNDARY_KIND: checkpoint.boundary_kind,
    }
    if checkpoint.pinned_ns is not None:
        yield Stage(names.PINNED, checkpoint.pinned_ns, known, f"{at} pinned")
    if checkpoint.promoted_ns is not None:
        yield Stage(names.PROMOTED, checkpoint.promoted_ns, known, f"{at} promoted")
    if checkpoint.published_ns is not None:
        yield Stage(names.PUBLISHED, checkpoint.published_ns, known, f"{at} published")
    if checkpoint.discarded_ns is not None:
        reason = checkpoint.discard_reason
        yield Stage(
            names.DISCARDED,
            checkpoint.discarded_ns,
            {**known, names.REASON: reason},
            f"{at} discarded: {reason}",
        )
    yield from checkpoint_ends(checkpoint)


def num_stages(request: RequestRecord, checkpoints: Iterable[CheckpointRecord]) -> int:
    """How many stages the two functions above tell, without telling them."""
    count = int(request.admitted_ns is not None)
    for checkpoint in checkpoints:
        count += (
            (checkpoint.pinned_ns is not None)
            + (checkpoint.promoted_ns is not None)
            + (checkpoint.published_ns is not None)
            + (checkpoint.discarded_ns is not None)
            + (checkpoint.attention_evicted_ns is not None)
            + (checkpoint.evicted_ns is not None)
        )
    return count


def checkpoint_ends(checkpoint: CheckpointRecord) -> Iterator[Stage]:
    """What befell a checkpoint after it was published."""
    at = f"checkpoint {checkpoint.checkpoint_id} at token {checkpoint.boundary}"
    known = {
        names.CHECKPOINT_ID: checkpoint.checkpoint_id,
        names.BOUNDARY: checkpoint.boundary,
        names.BOUNDARY_KIND: checkpoint.boundary_kind,
        names.NUM_HITS: checkpoint.num_hits,
    }
    published_ns = checkpoint.published_ns
    for name, time_ns, reason in (
        (names.ATTENTION_EVICTED, checkpoint.attention_evicted_ns, None),
        (names.EVICTED, checkpoint.evicted_ns, checkpoint.eviction_reason),
    ):
        if time_ns is not None:
            age = (time_ns - published_ns) / 1e9 if published_ns is not None else None
            yield Stage(
                name,
                time_ns,
                {**known, names.REASON: reason, names.AGE: age},
                f"{at} {name.rsplit('.', 1)[1].replace('_', ' ')} "
                f"after {checkpoint.num_hits} hits",
            )


def log_record(
    stage: Stage, trace_id: bytes, span_id: bytes, observed_ns: int
) -> LogRecord:
    """``stage`` as a log record of the span with these ids."""
    record = LogRecord(
        time_unix_nano=stage.time_ns,
        observed_time_unix_nano=observed_ns,
        severity_number=SEVERITY_NUMBER_INFO,
        event_name=stage.name,
        trace_id=trace_id,
        span_id=span_id,
        flags=1,
    )
    record.body.string_value = stage.body
    set_attributes(record.attributes, stage.attributes)
    return record
