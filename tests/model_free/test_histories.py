"""Random histories of requests, checked after each step against a model of memory.

Every step: no request starts from a state or page that is not its own prefix, every
entry of the prefix cache is what it promises, every block reference has an owner.
At each preemption: no block is held by pins alone, so stock vLLM would have had to
preempt in the same situation. At the end: no leak, and the cache resets.
"""

import os
import random
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.math_utils import cdiv
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_fork.model_free import (
    STOP_TOKEN,
    ModelFreeEngine,
    PrefixCacheAudit,
    blocks_only_pins_hold,
    make_engine,
    make_request,
    references_beyond_requests,
    with_recorded_checkpoints,
)

NUM_CONVERSATIONS = 3
PLACEHOLDER = 9
IMAGE_TOKENS = 2
OTHER = {"cat": "dog", "dog": "cat"}
PUBLISH_ON = [
    ["stop"],
    ["stop"],
    ["stop", "length", "abort"],
    ["stop", "length", "abort", "preempt"],
]


@dataclass(frozen=True)
class Mode:
    """How steps overlap and speculate."""

    name: str
    batch_queue_size: int
    num_speculative_tokens: int = 0

    @property
    def is_async(self) -> bool:
        return self.batch_queue_size > 1

    @property
    def scheduler(self) -> type[Scheduler]:
        return AsyncScheduler if self.is_async else Scheduler


MODES = [
    Mode("sync", 1),
    Mode("async", 2),
    Mode("async, three steps in flight", 3),
    Mode("sync, 2 drafts", 1, 2),
    Mode("sync, 4 drafts", 1, 4),
    Mode("async, 2 drafts", 2, 2),
    Mode("async, 4 drafts", 2, 4),
]


def minimum_blocks(
    num_tokens: int,
    block_size: int,
    mode: Mode,
    num_attention_groups: int,
    num_mamba_groups: int,
    exports: bool,
) -> int:
    """Blocks with which stock vLLM finishes a lone request of ``num_tokens``."""
    drafts = mode.num_speculative_tokens
    attention = cdiv(num_tokens + drafts, block_size) + 1
    recurrent = 3 + drafts + exports
    return 1 + num_attention_groups * attention + num_mamba_groups * recurrent


@cache
def without_stock_faults(cls: type[Scheduler]) -> type[Scheduler]:
    """Repairs what test_stock_faults.py shows, as ours does: what is left is right."""

    class Guarded(cls):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            take = self.kv_cache_manager.take_kv_cache_block_copies

            def take_kv_cache_block_copies():
                copies, retained = take()
                origin: dict[int, int] = {}
                for source, destination in copies:
                    origin[destination] = origin.get(source, source)
                return [
                    KVCacheBlockCopy(origin[destination], destination)
                    for _, destination in copies
                ], retained

            self.kv_cache_manager.take_kv_cache_block_copies = (
                take_kv_cache_block_copies
            )

        def _mamba_block_aligned_split(self, request, num_new_tokens, *computed):
            num_new_tokens = super()._mamba_block_aligned_split(
                request, num_new_tokens, *computed
            )
            start = request.num_computed_tokens + sum(computed)
            is_prefill = start < max(request.num_prompt_tokens, request.num_tokens - 1)
            if self.mamba_has_prefill_checkpoint_blocks and is_prefill:
                up_to_block_end = self.block_size - start % self.block_size
                if up_to_block_end < self.block_size:
                    num_new_tokens = min(num_new_tokens, up_to_block_end)
            return num_new_tokens

    return Guarded


class Histories(RuleBasedStateMachine):
    """Conversations that take turns, end in every way, and share prefixes."""

    def retention_settings(
        self, exact_tail: bool, copy_units: int, publish_on: list[str]
    ) -> dict | None:
        """None: stock vLLM."""
        return None

    def check_step(self) -> None:
        if self.settings is None:
            assert references_beyond_requests(self.engine.scheduler) == {}
        else:
            assert self.engine.scheduler.check_integrity() is not None

    @initialize(
        mode=st.sampled_from(MODES),
        num_attention_groups=st.sampled_from([1, 1, 2]),
        num_mamba_groups=st.integers(1, 3),
        exports=st.booleans(),
        num_request_blocks=st.sampled_from([4, 16, 16]),
        slack=st.sampled_from([0, 1, 3, 20, 300]),
        token_budget=st.sampled_from([24, 96, 4096]),
        retention_interval=st.sampled_from([0, 0, 2]),
        v2_model_runner=st.booleans(),
        exact_tail=st.booleans(),
        copy_units=st.sampled_from([0, 0, 1, 3]),
        one_step_tokens=st.sampled_from([0, 20, 256]),
        publish_on=st.sampled_from(PUBLISH_ON),
        seed=st.integers(0, 1 << 16),
    )
    def start(
        self,
        mode,
        num_attention_groups,
        num_mamba_groups,
        exports,
        num_request_blocks,
        slack,
        token_budget,
        retention_interval,
        v2_model_runner,
        exact_tail,
        copy_units,
        one_step_tokens,
        publish_on,
        seed,
    ):
        self.block_size, self.hash_unit = (64, 16) if exports else (32, 4)
        self.max_tokens = num_request_blocks * self.block_size
        self.settings = self.retention_settings(exact_tail, copy_units, publish_on)
        if self.settings is not None:
            self.settings["one_step_tokens"] = one_step_tokens
        cls = mode.scheduler
        if self.settings is None:
            cls = without_stock_faults(cls)
        else:
            cls = with_recorded_checkpoints(cls)
        self.random = random.Random(seed)
        acceptance = random.Random(seed + 1)
        self.engine: ModelFreeEngine = make_engine(
            cls,
            batch_queue_size=mode.batch_queue_size,
            accept=lambda request_id, position, drafts: acceptance.randint(0, drafts),
            block_size=self.block_size,
            hash_unit=self.hash_unit,
            num_attention_groups=num_attention_groups,
            num_mamba_groups=num_mamba_groups,
            num_blocks=slack
            + minimum_blocks(
                self.max_tokens,
                self.block_size,
                mode,
                num_attention_groups,
                num_mamba_groups,
                exports,
            ),
            async_scheduling=mode.is_async,
            num_speculative_tokens=mode.num_speculative_tokens,
            num_prefill_checkpoint_blocks=int(exports),
            retention_interval=retention_interval * self.block_size,
            max_num_batched_tokens=token_budget,
            max_num_seqs=NUM_CONVERSATIONS,
            v2_model_runner=v2_model_runner,
            settings=self.settings,
        )
        scheduler = self.engine.scheduler
        scheduler.max_num_encoder_input_tokens = 4 * IMAGE_TOKENS
        scheduler.encoder_cache_manager = EncoderCacheManager(4 * IMAGE_TOKENS)
        self.audit = PrefixCacheAudit(self.engine)
        self.shared = self.tokens(3 * self.block_size)
        self.history: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
        # What was seen in each, as (identifier, first token).
        self.images: list[list[tuple[str, int]]] = [[] for _ in self.history]
        self.running: dict[int, str] = {}
        self.num_turns = 0
        self.resetting = False
        self.failed = False
        preempt = self.engine.scheduler._preempt_request

        def preempt_request(request, *args, **kwargs):
            if not self.resetting:
                assert blocks_only_pins_hold(self.engine.scheduler) == []
            return preempt(request, *args, **kwargs)

        self.engine.scheduler._preempt_request = preempt_request

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(20, 500) for _ in range(count)]

    def idle(self) -> list[int]:
        return [i for i in range(NUM_CONVERSATIONS) if i not in self.running]

    def step(self) -> None:
        self.failed = True  # nothing more to learn in teardown if this raises
        self.engine.step()
        assert self.engine.worker.errors == []
        assert self.audit.problems() == []
        self.check_step()
        self.failed = False
        for conversation, request_id in list(self.running.items()):
            if self.engine.requests[request_id].is_finished():
                del self.running[conversation]

    @precondition(lambda self: self.idle())
    @rule(
        pick=st.integers(0, NUM_CONVERSATIONS - 1),
        replayed=st.sampled_from(["all", "all", "all", "no stop token", "rewritten"]),
        num_new=st.integers(1, 20),
        num_answer=st.integers(1, 12) | st.integers(1, 100),
        to_boundary=st.sampled_from([None, None, -1, 0, 1]),
        ending=st.sampled_from(["stop", "stop", "stop", "length"]),
        salt=st.sampled_from([*[None] * 9, "salt"]),
        image=st.sampled_from([None, None, None, "cat", "dog"]),
        swapped=st.sampled_from([False, False, True]),
    )
    def turn(
        self,
        pick,
        replayed,
        num_new,
        num_answer,
        to_boundary,
        ending,
        salt,
        image,
        swapped,
    ):
        """A client asks on; it may render the past otherwise than it was, and show
        other images in it."""
        conversation = self.idle()[pick % len(self.idle())]
        past = self.history[conversation]
        if replayed == "no stop token":
            past = past[:-1]
        elif replayed == "rewritten":
            past = past[: int(len(past) * 0.7)]
        if len(past) + num_new + 8 >= self.max_tokens - self.block_size:
            past = self.shared[: self.random.randrange(len(self.shared))]
        # One that is cut off, or not there, leaves its placeholders.
        images = [
            (OTHER[seen] if swapped else seen, first)
            for seen, first in self.images[conversation]
            if past[first : first + IMAGE_TOKENS] == [PLACEHOLDER] * IMAGE_TOKENS
        ]
        prompt = past + self.tokens(num_new)
        if image is not None:
            images.append((image, len(prompt)))
            prompt += [PLACEHOLDER] * IMAGE_TOKENS
        if to_boundary is not None:
            blocks = cdiv(len(prompt) + num_answer, self.block_size)
            num_answer = max(1, blocks * self.block_size + to_boundary - len(prompt))
        num_answer = min(num_answer, self.max_tokens - len(prompt))
        last = self.tokens(1) if ending == "length" else [STOP_TOKEN]
        answer = [*self.tokens(num_answer - 1), *last]
        request_id = f"request-{self.num_turns}"
        self.num_turns += 1
        self.engine.add(
            make_request(
                request_id,
                prompt,
                max_tokens=num_answer if ending == "length" else self.max_tokens,
                hash_unit=self.hash_unit,
                cache_salt=salt,
                mm_features=[
                    MultiModalFeatureSpec(
                        None, "image", seen, PlaceholderRange(first, IMAGE_TOKENS)
                    )
                    for seen, first in images
                ],
            ),
            answer,
        )
        self.running[conversation] = request_id
        self.history[conversation] = prompt + answer
        self.images[conversation] = images

    @precondition(lambda self: self.idle())
    @rule(
        pick=st.integers(0, NUM_CONVERSATIONS - 1),
        other=st.integers(0, NUM_CONVERSATIONS - 1),
    )
    def fork(self, pick, other):
        """One conversation goes on from where another one is."""
        fork = self.idle()[pick % len(self.idle())]
        self.history[fork] = self.history[other]
        self.images[fork] = self.images[other]

    @rule(count=st.integers(1, 80))
    def steps(self, count):
        for _ in range(count):
            if not self.engine.has_work:
                return
            self.step()

    @precondition(lambda self: self.running)
    @rule(
        pick=st.integers(0, NUM_CONVERSATIONS - 1),
        how=st.sampled_from([*["nothing"] * 5, "abort", "abort in flight", "error"]),
    )
    def end(self, pick, how):
        if how == "nothing":
            return
        conversation = sorted(self.running)[pick % len(self.running)]
        request_id = self.running.pop(conversation)
        request = self.engine.requests[request_id]
        self.history[conversation] = list(request.all_token_ids)
        if how == "abort in flight":
            self.engine.abort(request_id)
        elif how == "abort":
            self.engine.finish(request_id, RequestStatus.FINISHED_ABORTED)
        else:
            self.engine.finish(request_id, RequestStatus.FINISHED_ERROR)

    @rule(how=st.sampled_from([*["nothing"] * 9, "idle", "running"]))
    def reset(self, how):
        if how == "nothing":
            return
        self.resetting = True
        self.engine.scheduler.reset_prefix_cache(how == "running")
        self.resetting = False

    def teardown(self):
        if not hasattr(self, "engine") or self.failed:
            return
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "no end"
        assert references_beyond_requests(self.engine.scheduler) == {}
        assert self.engine.num_leaked_blocks == 0
        assert self.engine.scheduler.reset_prefix_cache()
        if self.settings is not None:
            assert self.engine.events.lifecycle_problems() == []
            assert self.engine.events.open_checkpoints() == []


class BlockAlignedHistories(Histories):
    """The same, with checkpoints at block boundaries retained."""

    def retention_settings(self, exact_tail, copy_units, publish_on):
        return {"retain": True, "exact_tail": False, "publish_on": publish_on}


class CheckpointHistories(Histories):
    """With exact tails and rolling copies as well."""

    def retention_settings(self, exact_tail, copy_units, publish_on):
        return {
            "retain": True,
            "exact_tail": exact_tail,
            "copy_interval": copy_units * self.hash_unit,
            "publish_on": publish_on,
        }


def play(machine: type[Histories], num_histories: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=50,
            deadline=None,
            derandomize="HYPOTHESIS_SEED" not in os.environ,
            suppress_health_check=list(HealthCheck),
            database=None,
            report_multiple_bugs=False,
            # Shrinking takes minutes; ask for it with SHRINK=1.
            phases=[p for p in Phase if p != Phase.shrink or os.environ.get("SHRINK")],
        ),
    )


def test_stock_has_no_wrong_state():
    """The model of memory agrees with vLLM itself: what it reports is ours."""
    play(Histories, 40)


def test_block_aligned_checkpoints():
    play(BlockAlignedHistories, 100)


def test_all_checkpoints():
    play(CheckpointHistories, 200)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "machine", [Histories, BlockAlignedHistories, CheckpointHistories]
)
def test_many_histories(machine):
    play(machine, 2000)
