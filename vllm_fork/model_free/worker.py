"""A worker that runs no model but knows what every block holds.

It follows vLLM's V1 model runner in ``mamba_cache_mode="align"``
(``vllm/v1/worker/gpu_model_runner.py``, ``mamba_utils.py``): queued block copies
first, then the states of all requests move to their new column, then attention
writes and reads, then the recurrent layers read and write, and after a
speculative step the aligned state moves out of the scratch columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.model_executor.layers.mamba.checkpoint import (
    compute_mamba_prefill_checkpoints,
)
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_fork.model_free.memory import BlockMemory, State
from vllm_fork.model_free.prefix import model_inputs, prefix_hashes, whole_input

FILLER_TOKEN = 11
"""What a request samples once its given completion is used up."""

Acceptance = Callable[[str, int, int], int]
"""(request id, position in tokens, drafts) -> drafts that are accepted."""


def accept_all(request_id: str, position: int, num_drafts: int) -> int:
    """Every draft is right."""
    return num_drafts


class StateError(NamedTuple):
    """A request met a state or a page that is not its own prefix."""

    step: int
    request_id: str
    group_id: int
    position: int
    """Tokens of the request that had been computed when the step began."""
    problem: str


class TokenSequence(NamedTuple):
    """The tokens a request will have, and the hash of each of their prefixes."""

    tokens: list[int]
    prefixes: NDArray[np.int64]

    def state(self, num_tokens: int) -> State:
        if num_tokens < len(self.prefixes):
            return State(num_tokens, int(self.prefixes[num_tokens]))
        return State(num_tokens, 0)


@dataclass(slots=True)
class _Row:
    """What the model runner remembers of a request."""

    block_ids: list[list[int]]
    num_prompt_tokens: int
    computed: int
    known: int
    """Tokens that exist; a step that does not consume them all samples nothing."""
    column: int | None = None
    """The Mamba column that holds the running state; None: as admitted."""
    accepted: int = 1
    """Sampled tokens of the last step: selects the scratch column."""


@dataclass(slots=True)
class _Work:
    """One request's share of one step."""

    request_id: str
    row: _Row
    sequence: TokenSequence
    start: int
    num_scheduled: int
    num_drafts: int
    num_accepted: int
    first_column: int
    column: int

    @property
    def certain_end(self) -> int:
        """Tokens computed when no draft is accepted."""
        return self.start + self.num_scheduled - self.num_drafts


class SimulatedWorker:
    """Executes scheduler outputs at once, in the order they were scheduled.

    That is what a device stream does: a step sees what all earlier steps wrote,
    whether or not the scheduler has processed their output.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        accept: Acceptance = accept_all,
        copied_slots: int | None = None,
    ) -> None:
        """Args:
        accept: how many drafts of a speculative step are accepted.
        copied_slots: see :class:`BlockMemory`.
        """
        config = scheduler.kv_cache_config
        groups = config.kv_cache_groups
        self.mamba_groups = [
            i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, MambaSpec)
        ]
        self.attention_groups = [
            i for i in range(len(groups)) if i not in self.mamba_groups
        ]
        self.block_size = scheduler.block_size
        self.hash_unit = scheduler.hash_block_size
        self.memory = BlockMemory(config.num_blocks, self.block_size, copied_slots)
        self.sequences: dict[str, TokenSequence] = {}
        self.errors: list[StateError] = []
        self.num_steps = 0
        self._accept = accept
        self._rows: dict[str, _Row] = {}
        self._num_garbage = 0
        self._exports = False
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            spec = manager.kv_cache_spec
            if isinstance(spec, MambaSpec) and spec.num_prefill_checkpoint_blocks:
                self._exports = True
                self._export_alignment = spec.prefill_checkpoint_alignment
                self._hit_alignment = manager.cache_hit_alignment_tokens

    def expect(self, request: Request, completion: Sequence[int]) -> None:
        """Say what ``request`` will sample after its prompt."""
        tokens = [*request.all_token_ids[: request.num_prompt_tokens], *completion]
        self.sequences[request.request_id] = TokenSequence(
            tokens, prefix_hashes(model_inputs(request, tokens), whole_input(request))
        )

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        self._update_rows(output)
        works = [
            self._plan(request_id, num_tokens, output)
            for request_id, num_tokens in output.num_scheduled_tokens.items()
        ]
        self._move_states(works)
        self._run_attention(works)
        self._run_mamba(works)
        sampled = [self._finish(work) for work in works]
        if works:
            self.num_steps += 1
        request_ids = [work.request_id for work in works]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={r: i for i, r in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        for request_id in output.preempted_req_ids or ():
            if request_id in self._rows:
                self._rows[request_id].column = None
        if output.kv_cache_block_copies:
            self.memory.copy_blocks(output.kv_cache_block_copies)
        for new in output.scheduled_new_reqs:
            former = self._rows.get(new.req_id)  # a streaming session goes on
            num_prompt_tokens = length_from_prompt_token_ids_or_embeds(
                new.prompt_token_ids, new.prompt_embeds
            )
            self._rows[new.req_id] = _Row(
                block_ids=[list(ids) for ids in new.block_ids],
                num_prompt_tokens=num_prompt_tokens,
                computed=new.num_computed_tokens,
                known=len(new.prefill_token_ids or ()) or num_prompt_tokens,
                column=former.column if former else None,
            )
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            row = self._rows[request_id]
            new_block_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                assert new_block_ids is not None
                self._rows[request_id] = _Row(
                    block_ids=[list(ids) for ids in new_block_ids],
                    num_prompt_tokens=row.num_prompt_tokens,
                    computed=cached.num_computed_tokens[i],
                    known=row.num_prompt_tokens + cached.num_output_tokens[i],
                )
            elif new_block_ids is not None:
                for ids, new_ids in zip(row.block_ids, new_block_ids, strict=True):
                    ids.extend(new_ids)

    def _plan(self, request_id: str, num_tokens: int, output: SchedulerOutput) -> _Work:
        row = self._rows[request_id]
        num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        start = row.computed
        accepted = 0
        if num_drafts:
            accepted = min(self._accept(request_id, start, num_drafts), num_drafts)
        column = row.column
        return _Work(
            request_id=request_id,
            row=row,
            sequence=self.sequences[request_id],
            start=start,
            num_scheduled=num_tokens,
            num_drafts=num_drafts,
            num_accepted=accepted,
            first_column=(start - 1) // self.block_size if column is None else column,
            column=cdiv(start + num_tokens, self.block_size) - 1,
        )

    def _move_states(self, works: Sequence[_Work]) -> None:
        """``preprocess_mamba``: carry the running state into this step's column."""
        for work in works:
            row, source = work.row, work.first_column
            row.column = work.column
            if source in (-1, work.column):
                continue
            for group_id in self.mamba_groups:
                table = row.block_ids[group_id]
                self.memory.move_state(
                    group_id,
                    temporal_from=table[source + row.accepted - 1],
                    convolution_from=table[source],
                    to=table[work.column],
                    skip=row.accepted - 1,
                )
            row.accepted = 1

    def _run_attention(self, works: Sequence[_Work]) -> None:
        """All requests write their keys and values, then all read their prefix."""
        size, slots = self.block_size, self.memory.slots
        for work in works:
            end = work.start + work.num_scheduled
            right = work.certain_end + work.num_accepted
            values = np.empty(work.num_scheduled, np.int64)
            prefixes = work.sequence.prefixes[work.start + 1 : right + 1]
            values[: len(prefixes)] = prefixes
            for i in range(len(prefixes), work.num_scheduled):
                values[i] = self._garbage()
            for group_id in self.attention_groups:
                table = work.row.block_ids[group_id]
                for column in range(work.start // size, cdiv(end, size)):
                    first = max(work.start, column * size)
                    last = min(end, (column + 1) * size)
                    block_id = table[column]
                    if block_id == 0:
                        self._error(work, group_id, f"writes null block {column}")
                        continue
                    self.memory.claim(block_id, group_id)
                    slots[block_id, first - column * size : last - column * size] = (
                        values[first - work.start : last - work.start]
                    )
        for work in works:
            read = min(work.certain_end, len(work.sequence.tokens))
            want = work.sequence.prefixes[1 : read + 1]
            for group_id in self.attention_groups:
                table = work.row.block_ids[group_id][: cdiv(read, size)]
                got = slots[table].reshape(-1)[:read]
                if not np.array_equal(got, want):
                    wrong = int(np.flatnonzero(got != want)[0])
                    self._error(
                        work, group_id, f"attention page wrong at token {wrong}"
                    )
                elif any(self.memory.owner[b] != group_id for b in table):
                    self._error(work, group_id, "attention page of another group")

    def _run_mamba(self, works: Sequence[_Work]) -> None:
        """All requests read their initial state, then all write the new ones."""
        readers: dict[int, str] = {}
        for work in works:
            if work.start > 0:
                for group_id in self.mamba_groups:
                    readers[self._read_initial(work, group_id)] = work.request_id
        writers: dict[int, str] = {}
        for work in works:
            for group_id in self.mamba_groups:
                for block_id in self._write_states(work, group_id):
                    other = writers.setdefault(block_id, work.request_id)
                    reader = readers.get(block_id, work.request_id)
                    if other != work.request_id:
                        self._error(work, group_id, f"{other} writes the same block")
                    if reader != work.request_id:
                        self._error(work, group_id, f"{reader} reads what it writes")

    def _read_initial(self, work: _Work, group_id: int) -> int:
        table, row = work.row.block_ids[group_id], work.row
        temporal = table[work.column + row.accepted - 1]
        want = work.sequence.state(work.start)
        skip = row.accepted - 1
        memory = self.memory
        window = memory.convolution[table[work.column]]
        if (
            memory.owner[temporal] != group_id
            or memory.temporal[temporal] != want
            or window[skip : skip + 1] != (want,)
        ):
            self._error(
                work,
                group_id,
                f"initial state is {memory.temporal[temporal]} with window "
                f"{window[skip : skip + 1]} of group {memory.owner[temporal]}",
            )
        return temporal

    def _write_states(self, work: _Work, group_id: int) -> list[int]:
        """The states after this step; returns the blocks written."""
        table, column = work.row.block_ids[group_id], work.column
        end = work.certain_end
        states = [
            work.sequence.state(end + i)
            if i <= work.num_accepted
            else State(end + i, self._garbage())
            for i in range(work.num_drafts + 1)
        ]
        blocks = [table[column + i] for i in range(work.num_drafts + 1)]
        if 0 in blocks:
            self._error(work, group_id, f"writes a null block at column {column}")
            return []
        for block_id, state in zip(blocks, states, strict=True):
            self.memory.claim(block_id, group_id)
            self.memory.temporal[block_id] = state
        self.memory.convolution[blocks[0]] = tuple(states)
        return [*blocks, *self._export(work, group_id)]

    def _export(self, work: _Work, group_id: int) -> list[int]:
        """The sub-block state that some backends save during a prefill."""
        if not self._exports or work.num_scheduled <= 1 + work.num_drafts:
            return []
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [work.start + work.num_scheduled],
            [work.num_scheduled],
            hash_block_size=self.hash_unit,
            mamba_block_size=self.block_size,
            checkpoint_alignment=self._export_alignment,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=self._hit_alignment,
        )
        block_id = work.row.block_ids[group_id][column] if column >= 0 else 0
        if block_id == 0:
            return []
        self.memory.write_state(
            block_id, group_id, work.sequence.state(work.start + offset)
        )
        return [block_id]

    def _finish(self, work: _Work) -> list[int]:
        """Advance the request; returns the tokens it sampled."""
        row, end = work.row, work.certain_end
        row.computed = end + work.num_accepted
        if end < row.known:
            return []
        row.known = row.computed + 1
        row.accepted = 1
        if work.num_drafts:
            self._keep_aligned_state(work)
        tokens = work.sequence.tokens
        return [
            tokens[i] if i < len(tokens) else FILLER_TOKEN
            for i in range(end, row.computed + 1)
        ]

    def _keep_aligned_state(self, work: _Work) -> None:
        """``postprocess_mamba``: move a crossed block boundary into its column."""
        row, size = work.row, self.block_size
        aligned = row.computed // size * size
        row.accepted = work.num_accepted + 1
        if aligned < work.certain_end:
            return
        skip = aligned - work.certain_end
        destination = aligned // size - 1
        if destination == work.column:
            row.accepted = 1
            if skip == 0:
                return
        for group_id in self.mamba_groups:
            table = row.block_ids[group_id]
            self.memory.move_state(
                group_id,
                temporal_from=table[work.column + skip],
                convolution_from=table[work.column],
                to=table[destination],
                skip=skip,
            )

    def _garbage(self) -> int:
        """A value that no prefix hashes to and that no two writes share."""
        self._num_garbage += 1
        return -self._num_garbage

    def _error(self, work: _Work, group_id: int, problem: str) -> None:
        self.errors.append(
            StateError(self.num_steps, work.request_id, group_id, work.start, problem)
        )
