"""Attention blocks that leave the cache under a published checkpoint."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from event_consumer import tables
from event_consumer.kv_events import KvEventReader
from vllm_fork.events import (
    CheckpointEvicted,
    CheckpointPinned,
    CheckpointPromoted,
    CheckpointPublished,
    EngineStarted,
)

CLOCK = {"time_unix_ns": 1, "monotonic_ns": 1}


def stored(group: int, kind: str, *, as_array: bool):
    """As vLLM 0.32 encodes ``BlockStored`` (a map), or an array of the same fields."""
    fields = {
        "block_hashes": [b"\xaa"],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": group,
        "kv_cache_spec_kind": kind,
    }
    if as_array:
        return ["BlockStored", *fields.values()]
    return {"type": "BlockStored", **fields}


def removed(group: int | None, *hashes, as_array: bool):
    if as_array:
        return ["BlockRemoved", list(hashes), "GPU", group]
    return {
        "type": "BlockRemoved",
        "block_hashes": list(hashes),
        "medium": "GPU",
        "group_idx": group,
    }


def payload(*events) -> bytes:
    return msgspec.msgpack.encode([2.5, list(events), 0])


@pytest.mark.parametrize("as_array", [False, True])
def test_removed_attention_blocks_are_told_from_the_others(as_array):
    reader = KvEventReader()
    first = payload(
        removed(0, b"\x01", as_array=as_array),  # of a group that is not known yet
        stored(0, "full_attention", as_array=as_array),
        stored(1, "mamba", as_array=as_array),
        removed(0, b"\xab", 7, as_array=as_array),
        removed(1, b"\xcd", as_array=as_array),
        removed(None, b"\xef", as_array=as_array),
        {"type": "AllBlocksCleared"},
        {"type": "SomethingNew", "x": 1},
        "no event at all",
    )
    assert reader.read(first) == (2_500_000_000, ["ab", "7"])
    assert reader.read(payload(removed(0, b"\x02", as_array=as_array)))[1] == ["02"]


@pytest.mark.parametrize("bad", [b"", b"\xc1", msgspec.msgpack.encode({"ts": 1})])
def test_what_is_no_batch_is_refused(bad):
    with pytest.raises(msgspec.DecodeError):
        KvEventReader().read(bad)


def test_a_published_checkpoint_without_its_attention_says_so(
    serve, raw_publisher, zmq_context, sqlite_url, rows, wait_for
):
    stock = zmq_context.socket(zmq.PUB)
    stock.bind("tcp://127.0.0.1:*")
    at = stock.getsockopt_string(zmq.LAST_ENDPOINT)
    publisher = raw_publisher
    serve(publisher, endpoint={"kv_events": at})
    publisher.greet()
    life = {"request_id": "r", "boundary": 96, "boundary_kind": "decode_block"}
    for number in (1, 2):
        each = {**CLOCK, **life, "checkpoint_id": number}
        publisher.send(
            number - 1,
            *(
                [
                    EngineStarted(
                        **CLOCK, vllm_version="", fork_version="", retention="on"
                    )
                ]
                if number == 1
                else []
            ),
            CheckpointPinned(**each, num_blocks=1),
            CheckpointPromoted(**each),
            CheckpointPublished(**each, block_hash=bytes([number])),
        )
    publisher.send(
        2,
        CheckpointEvicted(**CLOCK, **life, checkpoint_id=2, reason="lru", age_s=1.0),
    )
    wait_for(lambda: rows(sqlite_url, tables.checkpoints, stage="evicted"))
    told = payload(
        stored(0, "full_attention", as_array=False),
        removed(0, b"\x01", b"\x02", b"\x03", as_array=False),
    )

    def marked():
        # A subscription has no acknowledgement: what is told again changes nothing.
        stock.send_multipart((b"kv-events", bytes(8), told))
        stock.send_multipart((b"kv-events", bytes(8), b"\xc1"))
        return [
            (row["checkpoint_id"], row["stage"], row["attention_evicted_ns"])
            for row in rows(sqlite_url, tables.checkpoints)
            if row["attention_evicted_ns"]
        ]

    assert wait_for(marked) == [(1, "published", 2_500_000_000)]
