"""vLLM's own KV-event stream, read for one thing that the checkpoint stream cannot
tell: that attention blocks under a published checkpoint were evicted.

A checkpoint is of use only together with the attention blocks below its boundary.
They are evicted from the deepest on, and the deepest has the hash under which the
checkpoint was published. What is read here is a hint: that stream has no epochs, it
is not replayed, and nothing is stored of where it stood.
"""

from __future__ import annotations

import logging
from typing import Any, Final, NamedTuple

import msgspec

logger = logging.getLogger(__name__)

MAMBA: Final = "mamba"
"""vLLM's ``KVCacheSpecKind`` of recurrent state; every other kind is attention."""

BlockHash = bytes | int


class _BatchOfRaw(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _Stored(msgspec.Struct, tag="BlockStored"):
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[BlockHash] = []
    group_idx: int | None = None


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True):
    """vLLM's fields in their order, for publishers that encode events as arrays."""

    block_hashes: msgspec.Raw
    parent_block_hash: msgspec.Raw
    token_ids: msgspec.Raw
    block_size: msgspec.Raw
    lora_id: msgspec.Raw
    medium: msgspec.Raw = msgspec.Raw()
    lora_name: msgspec.Raw = msgspec.Raw()
    extra_keys: msgspec.Raw = msgspec.Raw()
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class Removed(NamedTuple):
    """Attention blocks that left the cache."""

    time_ns: int
    block_hashes: list[str]
    """As the store writes them: hex of bytes, or decimal."""


class KvEventReader:
    """Reads the payloads of one engine. Events of other kinds are skipped."""

    def __init__(self) -> None:
        self._batch = msgspec.msgpack.Decoder(_BatchOfRaw)
        self._map = msgspec.msgpack.Decoder(_Stored | _Removed)
        self._array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray)
        self._is_mamba: dict[int, bool] = {}

    def read(self, payload: bytes) -> Removed:
        """The attention blocks that a batch says were removed.

        What group a block is of is learned from the blocks that were stored; of a
        group that is not known nothing is said.

        Raises:
            msgspec.DecodeError: the payload is no batch.
        """
        batch = self._batch.decode(payload)
        hashes: list[str] = []
        for raw in batch.events:
            event = self._decode(raw)
            if isinstance(event, _Stored | _StoredArray):
                if event.group_idx is not None and event.kv_cache_spec_kind:
                    self._is_mamba[event.group_idx] = event.kv_cache_spec_kind == MAMBA
            elif event is not None and self._is_mamba.get(event.group_idx) is False:
                hashes += map(hash_text, event.block_hashes)
        return Removed(int(batch.ts * 1e9), hashes)

    def _decode(self, raw: msgspec.Raw) -> Any:
        """Maps and arrays alike; None for an event of another kind."""
        first = bytes(raw)[0]
        is_array = 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)
        try:
            return (self._array if is_array else self._map).decode(raw)
        except msgspec.DecodeError:
            return None


def hash_text(block_hash: BlockHash) -> str:
    """A block hash as the store writes it."""
    return block_hash.hex() if isinstance(block_hash, bytes) else str(block_hash)
