"""What each physical block of the KV cache holds."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNOWNED = -1


class State(NamedTuple):
    """A recurrent state: that of the prefix ``prefix_hash``, ``num_tokens`` long."""

    num_tokens: int
    prefix_hash: int


class BlockMemory:
    """The pages of all KV-cache groups.

    vLLM overlays the groups on the same memory and hands a block to one group at
    a time, so there is one page a block. It holds either

    * attention keys and values, one hash a token slot (:attr:`slots`), or
    * a recurrent state in two parts that vLLM moves differently: the *temporal*
      state, and the *convolution* window, which after a speculative step covers
      several positions (element ``i``: the window if ``i`` drafts are accepted).

    Whoever writes a block that another group wrote before erases what it held.
    """

    def __init__(
        self, num_blocks: int, block_size: int, copied_slots: int | None = None
    ) -> None:
        """Args:
        block_size: token slots of a page.
        copied_slots: token slots that a block copy really copies; None: all.
            vLLM 0.32's copy helper truncates a page to the bytes of the Mamba
            view when that one comes first.
        """
        self.slots: NDArray[np.int64] = np.zeros((num_blocks, block_size), np.int64)
        self.temporal: list[State | None] = [None] * num_blocks
        self.convolution: list[tuple[State, ...]] = [()] * num_blocks
        self.owner = [UNOWNED] * num_blocks
        self._copied_slots = block_size if copied_slots is None else copied_slots

    def claim(self, block_id: int, group_id: int) -> None:
        """Make ``group_id`` the writer of the block."""
        if self.owner[block_id] != group_id:
            self.owner[block_id] = group_id
            self.slots[block_id] = 0
            self.temporal[block_id] = None
            self.convolution[block_id] = ()

    def write_state(self, block_id: int, group_id: int, state: State) -> None:
        self.claim(block_id, group_id)
        self.temporal[block_id] = state
        self.convolution[block_id] = (state,)

    def holds_state(self, block_id: int, group_id: int, state: State) -> bool:
        """Whether the block holds exactly ``state``, complete in both parts."""
        return (
            self.owner[block_id] == group_id
            and self.temporal[block_id] == state
            and self.convolution[block_id][:1] == (state,)
        )

    def move_state(
        self,
        group_id: int,
        temporal_from: int,
        convolution_from: int,
        to: int,
        skip: int,
    ) -> None:
        """Copy a state between blocks, as vLLM's Mamba copy does.

        The temporal part comes whole from its block; of the convolution window
        the first ``skip`` positions are dropped.
        """
        owned = self.owner[temporal_from] == self.owner[convolution_from] == group_id
        temporal = self.temporal[temporal_from] if owned else None
        window = self.convolution[convolution_from][skip:] if owned else ()
        self.claim(to, group_id)
        self.temporal[to] = temporal
        self.convolution[to] = window

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages: all sources are read before any destination is written.

        Two copies to one block race on a device, so it then holds neither.
        """
        source = [pair[0] for pair in copies]
        destination = [pair[1] for pair in copies]
        slots = self.slots[source]
        temporal = [self.temporal[b] for b in source]
        convolution = [self.convolution[b] for b in source]
        owner = [self.owner[b] for b in source]
        for i, block_id in enumerate(destination):
            self.claim(block_id, owner[i])
            self.slots[block_id, : self._copied_slots] = slots[i, : self._copied_slots]
            self.temporal[block_id] = temporal[i]
            self.convolution[block_id] = convolution[i]
            if destination.count(block_id) > 1:
                self.claim(block_id, UNOWNED)
