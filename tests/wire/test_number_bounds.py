"""Numbers that no database takes cost their event, not the batch."""

from __future__ import annotations

import msgspec
import pytest

from vllm_fork.events import CheckpointPinned, EventBatch, EventsDropped, decode_batch


def batch_with(**bad: int) -> bytes:
    good = EventsDropped(time_unix_ns=1, monotonic_ns=1, count=1)
    event = {
        "type": "CheckpointPinned",
        "time_unix_ns": 1,
        "monotonic_ns": 1,
        "request_id": "a",
        "checkpoint_id": 1,
        "boundary": 64,
        "boundary_kind": "copy",
        "num_blocks": 1,
        **bad,
    }
    return msgspec.msgpack.encode(EventBatch(1.0, [good, event, good]))


def test_within_bounds():
    decoded = decode_batch(batch_with(boundary=2**31 - 1, time_unix_ns=2**63 - 1))
    assert [type(e) for e in decoded.events][1] is CheckpointPinned
    assert decoded.errors == []


@pytest.mark.parametrize(
    "bad",
    [
        {"boundary": 2**31},
        {"boundary": -1},
        {"checkpoint_id": 2**63},
        {"time_unix_ns": 2**64 - 1},
        {"num_blocks": 2**64 - 1},
    ],
)
def test_beyond_bounds(bad):
    decoded = decode_batch(batch_with(**bad))
    assert [type(e) for e in decoded.events] == [EventsDropped, EventsDropped]
    assert len(decoded.errors) == 1


def test_a_header_beyond_bounds_is_no_batch():
    payload = msgspec.msgpack.encode(EventBatch(1.0, [], data_parallel_rank=2**40))
    with pytest.raises(msgspec.ValidationError):
        decode_batch(payload)
