"""Fills a store with conversations that look like an engine's, deterministically.

For the dashboard's tests, benchmark and screenshots: it writes the tables of
``event_consumer.tables`` directly, so that 100,000 requests take seconds. Every
stage, reason, kind and stream state occurs, and two engines, ``arm-off`` and
``arm-on``, hold the reference's dialog of five turns (vLLM PR 50551).

    python benchmarks/seeded_store.py --store sqlite:///sample.db --requests 2000
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from event_consumer import tables

BLOCK: Final = 1056
HASH_UNIT: Final = 16
SECOND: Final = 1_000_000_000
MODEL: Final = "qwen3-next-35b-a3b"

REFERENCE: Final = {
    "arm-off": [
        (0, 61, 3613),
        (48, 3729, 4374),
        (3728, 8151, 2950),
        (8144, 11145, 1977),
        (11136, 13168, 8126),
    ],
    "arm-on": [
        (0, 61, 3518),
        (3168, 3634, 4080),
        (7392, 7763, 3071),
        (10560, 10878, 1290),
        (11616, 12214, 2935),
    ],
}
"""(cached, prompt, completion) tokens of each turn, by arm."""

RARE_REASONS: Final = (
    "stopped",
    "memory_pressure",
    "preempted",
    "aborted",
    "error",
    "unaccepted",
    "rejected",
    "rewound",
    "cache_reset",
    "already_cached",
    "shutdown",
    "never_admitted",
    "resumable",
    "unsupported:speculative",
    "unsupported:kv_connector",
)

_EMPTY_REQUEST: Final = {c.name: None for c in tables.requests.columns}
_EMPTY_CHECKPOINT: Final = {c.name: None for c in tables.checkpoints.columns}

_FINISH_OF: Final = {
    "length": "length",
    "aborted": "abort",
    "never_admitted": "abort",
    "error": "error",
    "shutdown": "abort",
}


@dataclass
class Rows:
    """Rows by table, and the counter that keeps checkpoint ids unique."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    next_checkpoint: int = 0


def engine_row(number: int, label: str, now_ns: int, **more: Any) -> dict[str, Any]:
    """An engine's row; ``more`` overrides columns."""
    row: dict[str, Any] = {c.name: None for c in tables.engines.columns}
    row.update(
        engine_id=f"00000000-0000-4000-8000-{number:012d}",
        data_parallel_rank=0,
        endpoint=f"tcp://127.0.0.1:{5567 + 10 * number}",
        label=label,
        model_name=MODEL,
        status="running",
        started_ns=now_ns - 7 * 3600 * SECOND,
        last_event_ns=now_ns - SECOND,
        retention="on",
        exact_tail="on",
        copy_interval=0,
        publish_on="stop",
        block_size=BLOCK,
        hash_unit=HASH_UNIT,
        num_blocks=4096,
        num_mamba_groups=3,
        async_scheduling=True,
        vllm_version="0.32.0",
        fork_version="0.1.0",
        events_dropped=0,
    )
    row.update(more)
    return row


def request_row(engine: dict[str, Any], external_id: str, end_ns: int, **more: Any):
    """A finished request's row that ended at ``end_ns``; ``more`` overrides columns."""
    row: dict[str, Any] = dict(_EMPTY_REQUEST)
    digest = hashlib.blake2b(external_id.encode(), digest_size=28).hexdigest()
    row.update(
        engine_id=engine["engine_id"],
        request_id=f"{external_id}-{digest[:8]}",
        external_request_id=external_id,
        label=engine["label"],
        model_name=engine["model_name"],
        data_parallel_rank=0,
        status="finished",
        incomplete=False,
        finished_ns=end_ns,
        last_event_ns=end_ns,
        num_external_tokens=0,
        finish_reason="stop",
        num_preemptions=0,
        num_superseded=0,
        source_kind="none",
        trace_id=digest[8:40],
        span_id=digest[40:56],
    )
    row.update(more)
    if row["conversation_id"] is None:
        row["conversation_id"] = (
            row["session_id"] or f"{row['engine_id']}/{row['request_id']}"
        )
    return row


def checkpoint_row(rows: Rows, request: dict[str, Any], boundary: int, **more: Any):
    """Append a checkpoint of ``request`` and return its row."""
    row: dict[str, Any] = dict(_EMPTY_CHECKPOINT)
    rows.next_checkpoint += 1
    row.update(
        engine_id=request["engine_id"],
        checkpoint_id=rows.next_checkpoint,
        request_id=request["request_id"],
        external_request_id=request["external_request_id"],
        stage="published",
        boundary=boundary,
        boundary_kind="decode_block",
        num_blocks=3,
        num_hits=0,
        trace_id=request["trace_id"],
        span_id=f"{rows.next_checkpoint:016x}",
        last_event_ns=request["last_event_ns"],
    )
    row.update(more)
    rows.checkpoints.append(row)
    return row


def add_turn(
    rows: Rows,
    rng: random.Random,
    engine: dict[str, Any],
    *,
    session_id: str | None,
    arrival_ns: int,
    tokens: tuple[int, int, int],
    reason: str | None,
    source: dict[str, Any] | None = None,
    conversation_id: str | None = None,
    external_id: str | None = None,
) -> dict[str, Any]:
    """Add one request with its checkpoints; return its row.

    Args:
        tokens: (cached, prompt, completion).
        reason: the no-checkpoint reason, None to publish one.
        source: the checkpoint row that the prompt resumed from.
    """
    cached, prompt, completion = tokens
    external_id = external_id or f"chatcmpl-{rng.getrandbits(64):016x}"
    admitted_ns = arrival_ns + rng.randrange(2, 180) * SECOND // 1000
    first_token_ns = admitted_ns + int((prompt - cached) / 9000 * SECOND)
    ns_a_token = SECOND // 110
    end_ns = first_token_ns + completion * ns_a_token
    if reason == "never_admitted":
        cached, completion, end_ns = 0, 0, arrival_ns + 2 * SECOND
    request = request_row(
        engine,
        external_id,
        end_ns,
        session_id=session_id,
        conversation_id=conversation_id or session_id,
        arrival_ns=arrival_ns,
        admitted_ns=None if reason == "never_admitted" else admitted_ns,
        num_prompt_tokens=prompt,
        num_output_tokens=completion,
        num_cached_tokens=cached,
        no_checkpoint_reason=reason,
        finish_reason=_FINISH_OF.get(reason or "", "stop"),
        num_preemptions=1 if reason == "preempted" else 0,
    )
    if cached and source is not None:
        request.update(
            source_kind=source["boundary_kind"],
            source_request_id=source["request_id"],
            source_external_request_id=source["external_request_id"],
            source_checkpoint_id=source["checkpoint_id"],
            source_boundary=source["boundary"],
            hit_limited_by="attention",
        )
        source["num_hits"] += 1
    elif cached:
        request.update(
            source_kind=rng.choice(("prompt_replay", "shared_prefix")),
            hit_limited_by="recurrent_state",
            shared_prefix_boundary=min(prompt - 1, cached + 3 * BLOCK),
        )
    else:
        request.update(hit_limited_by="skipped" if rng.random() < 0.02 else "attention")
    rows.requests.append(request)

    def decoded_at(boundary: int) -> int:
        return first_token_ns + (boundary - prompt) * ns_a_token

    if engine["retention"] != "on" or reason in ("never_admitted", "disabled"):
        return request
    held = None
    first = (prompt // BLOCK + 1) * BLOCK
    for boundary in range(first, prompt + completion, BLOCK):
        at_ns = decoded_at(boundary)
        row = checkpoint_row(
            rows,
            request,
            boundary,
            pinned_ns=at_ns - ns_a_token,
            promoted_ns=at_ns,
            last_event_ns=at_ns,
            stage="promoted",
        )
        if held is not None:
            held.update(
                stage="discarded",
                discarded_ns=at_ns,
                last_event_ns=at_ns,
                discard_reason="superseded",
            )
            row.update(
                supersedes_checkpoint_id=held["checkpoint_id"],
                supersedes_boundary=held["boundary"],
            )
            request["num_superseded"] += 1
        held = row
    if held is not None and reason is not None:
        held.update(
            stage="discarded",
            discarded_ns=end_ns,
            last_event_ns=end_ns,
            discard_reason=reason.partition(":")[0]
            if reason.startswith("unsupported")
            else reason,
        )
        if reason in ("unaccepted", "rejected"):
            held["promoted_ns"] = None
    if reason is not None:
        return request
    if held is not None:
        held.update(stage="published", published_ns=end_ns, last_event_ns=end_ns)
        held["block_hash"] = f"{rng.getrandbits(256):064x}"
    tail = held
    if engine["exact_tail"] == "on" and completion:
        tail = checkpoint_row(
            rows,
            request,
            prompt + completion,
            boundary_kind="exact_tail",
            pinned_ns=end_ns,
            promoted_ns=end_ns,
            published_ns=end_ns,
        )
    if tail is None:
        request["no_checkpoint_reason"] = "below_block"
    else:
        request["retained_boundary"] = tail["boundary"]
        request["retained_kind"] = tail["boundary_kind"]
    return request


def last_published(rows: Rows, request: dict[str, Any]) -> dict[str, Any] | None:
    """The deepest published checkpoint of the request added last."""
    row = rows.checkpoints[-1] if rows.checkpoints else None
    if row is None or row["request_id"] != request["request_id"]:
        return None
    return row if row["stage"] == "published" else None


def _add_reference(rows: Rows, rng: random.Random, engine: dict[str, Any], at: int):
    source = None
    session = f"reference-dialog-{engine['label']}"
    for turn, (cached, prompt, completion) in enumerate(REFERENCE[engine["label"]]):
        request = add_turn(
            rows,
            rng,
            engine,
            session_id=session,
            arrival_ns=at,
            tokens=(cached, prompt, completion),
            reason="disabled" if engine["retention"] == "off" else None,
            source=source,
            external_id=f"chatcmpl-{engine['label']}-turn-{turn}",
        )
        at = request["finished_ns"] + 4 * SECOND
        source = last_published(rows, request)


def _add_conversation(
    rows: Rows, rng: random.Random, engine: dict[str, Any], at: int, number: int
) -> None:
    has_session = rng.random() < 0.75
    session = (
        f"user-{rng.randrange(900):03d}/chat-{number:05d}" if has_session else None
    )
    conversation = session
    prompt = rng.choice((180, 420, 1400, 2600)) + rng.randrange(300)
    source, boundary = None, 0
    for turn in range(rng.choices((1, 2, 3, 4, 6, 9), (30, 22, 18, 14, 10, 6))[0]):
        completion = min(6000, max(8, int(rng.lognormvariate(6.1, 1.0))))
        if engine["retention"] == "off":
            reason: str | None = "disabled"
        else:
            reason = rng.choices(
                (None, "length", rng.choice(RARE_REASONS)), (80, 9, 11)
            )[0]
        cached = min(boundary, prompt - 1) if turn else 0
        if turn == 0 and prompt > 1500 and rng.random() < 0.5:
            cached = BLOCK
        request = add_turn(
            rows,
            rng,
            engine,
            session_id=session,
            conversation_id=conversation,
            arrival_ns=at,
            tokens=(cached, prompt, completion),
            reason=reason,
            source=source if turn else None,
        )
        conversation = conversation or request["conversation_id"]
        source = last_published(rows, request)
        if source is not None:
            boundary = source["boundary"]
            if rng.random() < 0.12:  # gone before the next turn came
                age = rng.randrange(20, 400) * SECOND
                source.update(
                    stage="evicted",
                    evicted_ns=request["finished_ns"] + age,
                    last_event_ns=request["finished_ns"] + age,
                    eviction_reason=rng.choices(
                        ("lru", "cache_reset", "replaced"), (90, 5, 5)
                    )[0],
                )
                source, boundary = None, prompt // HASH_UNIT * HASH_UNIT
        else:
            boundary = prompt // HASH_UNIT * HASH_UNIT
        at = request["finished_ns"] + rng.randrange(2, 90) * SECOND
        prompt += completion + rng.randrange(20, 400)


def _add_open_and_lost(rows: Rows, engines: list[dict[str, Any]], now_ns: int) -> None:
    running, lost = engines[2], engines[4]
    for i in range(4):
        request = request_row(
            running,
            f"chatcmpl-running-{i}",
            now_ns - (i + 1) * SECOND,
            status="open",
            session_id=f"user-live/chat-{i}",
            arrival_ns=now_ns - (8 + 4 * i) * SECOND,
            admitted_ns=now_ns - (7 + 4 * i) * SECOND,
            finished_ns=None,
            finish_reason=None,
            num_prompt_tokens=2200 + 700 * i,
            num_cached_tokens=1056 * i,
            hit_limited_by="attention" if not i else "prompt_end",
            source_kind="none" if not i else "prompt_replay",
        )
        rows.requests.append(request)
        checkpoint_row(
            rows,
            request,
            (request["num_prompt_tokens"] // BLOCK + 1) * BLOCK,
            stage="promoted" if i % 2 else "pinned",
            pinned_ns=now_ns - 3 * SECOND,
            promoted_ns=now_ns - 2 * SECOND if i % 2 else None,
        )
    for i in range(3):
        at = now_ns - (5000 + 40 * i) * SECOND
        request = request_row(
            lost,
            f"chatcmpl-lost-{i}",
            at,
            status="engine_lost",
            incomplete=i == 0,
            session_id=f"user-lost/chat-{i}",
            arrival_ns=at - 9 * SECOND,
            admitted_ns=at - 8 * SECOND,
            finished_ns=None,
            finish_reason=None,
            num_prompt_tokens=1800,
            num_cached_tokens=0,
            hit_limited_by="attention",
        )
        rows.requests.append(request)
        checkpoint_row(
            rows, request, 2112, stage="gone", pinned_ns=at - SECOND, promoted_ns=at
        )


def stream_row(engine: dict[str, Any], now_ns: int, **more: Any) -> dict[str, Any]:
    """A live stream's row; ``more`` overrides columns."""
    row: dict[str, Any] = {c.name: None for c in tables.streams.columns}
    for column in tables.streams.columns:
        if column.name.startswith("num_"):
            row[column.name] = 0
    row.update(
        endpoint=engine["endpoint"],
        replay_endpoint=engine["endpoint"][:-1] + "8",
        state="live",
        engine_id=engine["engine_id"],
        data_parallel_rank=0,
        applied_seq=48_211,
        last_batch_ns=now_ns - SECOND // 2,
        lag_ns=1_800_000,
        num_batches=48_212,
        num_events=311_904,
        updated_ns=now_ns - SECOND // 2,
    )
    row.update(more)
    return row


def seed(
    url: str,
    *,
    num_requests: int = 2000,
    hours: float = 6.0,
    seed_value: int = 1,
    now_ns: int | None = None,
    healthy: bool = False,
) -> int:
    """Create the tables at ``url`` and fill them; return the requests written.

    Args:
        url: SQLAlchemy URL of an empty SQLite file or PostgreSQL database.
        num_requests: at least this many (a conversation is not cut).
        hours: the requests spread over this long before ``now_ns``.
        healthy: all streams live; otherwise one is gapped, one lost batches and
            one is disconnected.
    """
    rng = random.Random(seed_value)
    now_ns = time.time_ns() if now_ns is None else now_ns
    engines = [
        engine_row(
            1,
            "arm-off",
            now_ns,
            retention="off",
            exact_tail="off",
            retention_reason="VLLM_PREFIX_CACHE_RETAIN_DECODE_CHECKPOINTS is 0",
        ),
        engine_row(2, "arm-on", now_ns, exact_tail="off"),
        engine_row(3, "prod-1", now_ns),
        engine_row(4, "prod-2", now_ns, copy_interval=64, events_dropped=12),
        engine_row(
            5,
            "prod-3",
            now_ns,
            status="running" if healthy else "lost",
            last_event_ns=now_ns - 4990 * SECOND,
        ),
    ]
    rows = Rows()
    span_ns = int(hours * 3600 * SECOND)
    for engine in engines[:2]:
        _add_reference(rows, rng, engine, now_ns - 900 * SECOND)
    _add_open_and_lost(rows, engines, now_ns)
    number = 0
    while len(rows.requests) < num_requests:
        number += 1
        age = int(span_ns * rng.random() ** 0.8) + 1100 * SECOND
        _add_conversation(rows, rng, rng.choice(engines[2:4]), now_ns - age, number)
    bound_to_now(rows, now_ns)
    # As if a consumer went on writing them: they do not fall silent for an hour.
    written_ns = now_ns + 3600 * SECOND
    streams = [stream_row(e, now_ns, updated_ns=written_ns) for e in engines]
    gaps: list[dict[str, Any]] = []
    if not healthy:
        streams[3].update(state="gapped", num_lost=37, num_replayed=214, num_dropped=12)
        streams[4].update(
            state="disconnected",
            last_batch_ns=now_ns - 4990 * SECOND,
            num_restarts=1,
        )
        gaps = [
            _gap(streams[3], 47_950, 47_987, "lost", now_ns - 3000 * SECOND, 30.0),
            _gap(streams[3], 48_212, 48_260, "open", now_ns - 4 * SECOND, None),
            _gap(streams[2], 12_004, 12_218, "recovered", now_ns - 9000 * SECOND, 0.4),
        ]
    write(url, engines, rows, streams, gaps)
    return len(rows.requests)


def bound_to_now(rows: Rows, now_ns: int) -> None:
    """Move what would lie in the future back to ``now_ns``."""
    for content in (rows.requests, rows.checkpoints):
        times = [name for name in content[0] if name.endswith("_ns")]
        for row in content:
            if row["last_event_ns"] <= now_ns:
                continue
            for name in times:
                if row[name] is not None and row[name] > now_ns:
                    row[name] = now_ns


def _gap(
    stream: dict[str, Any],
    first: int,
    end: int,
    status: str,
    detected: int,
    closed_after_s: float | None,
) -> dict[str, Any]:
    return {
        "endpoint": stream["endpoint"],
        "engine_id": stream["engine_id"],
        "first_seq": first,
        "end_seq": end,
        "status": status,
        "detected_ns": detected,
        "closed_ns": closed_after_s and detected + int(closed_after_s * SECOND),
    }


def write(
    url: str,
    engines: list[dict[str, Any]],
    rows: Rows,
    streams: list[dict[str, Any]],
    gaps: list[dict[str, Any]],
) -> None:
    """Create the tables where missing and insert the rows in one transaction."""
    engine = sa.create_engine(url)
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    tables.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(
            sa.insert(tables.meta).values(
                key="schema_version", value=str(tables.SCHEMA_VERSION)
            )
        )
        for table, content in (
            (tables.engines, engines),
            (tables.requests, rows.requests),
            (tables.checkpoints, rows.checkpoints),
            (tables.streams, streams),
            (tables.gaps, gaps),
        ):
            if content:
                _insert(connection, table, content)
    engine.dispose()


def _insert(
    connection: sa.Connection, table: sa.Table, content: list[dict[str, Any]]
) -> None:
    """Insert many rows of one shape, without a look at each row's keys."""
    names = list(content[0])
    statement = sa.insert(table).compile(connection.engine, column_keys=names)
    rows: Any = content
    if statement.positional:
        rows = [tuple([row[name] for name in names]) for row in content]
    connection.exec_driver_sql(str(statement), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", required=True, help="SQLAlchemy URL")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--healthy", action="store_true", help="all streams live")
    options = parser.parse_args()
    started = time.monotonic()
    written = seed(
        options.store,
        num_requests=options.requests,
        hours=options.hours,
        seed_value=options.seed,
        healthy=options.healthy,
    )
    took = time.monotonic() - started
    print(f"{written} requests in {took:.1f} s to {options.store}", file=sys.stderr)


if __name__ == "__main__":
    main()
