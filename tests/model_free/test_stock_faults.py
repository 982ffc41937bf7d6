"""Faults of vLLM 0.32 that the harness found without any of our code.

Each test shows the fault, and whether it is repaired where checkpoints are retained;
when a fault does not show, vLLM has repaired it, and our repair can go.
"""

import random

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_fork.model_free import (
    STOP_TOKEN,
    PrefixCacheAudit,
    make_engine,
    make_request,
    with_recorded_checkpoints,
)

RETAINED = {
    "cls": with_recorded_checkpoints(Scheduler),
    "settings": {"retain": True, "exact_tail": False},
}
STOCK = {"cls": Scheduler}
RETAINED_ASYNC = with_recorded_checkpoints(AsyncScheduler)

rng = random.Random(0)


def tokens(count: int) -> list[int]:
    return [rng.randrange(20, 500) for _ in range(count)]


@pytest.mark.parametrize("options", [STOCK, RETAINED], ids=["stock", "retained"])
def test_copies_from_a_block_not_yet_copied(options):
    """Two requests admitted in one step share more than the recurrent state covers.

    The second's copy-on-write source is the first's destination, and the worker
    reads all sources before it writes any destination.
    """
    engine = make_engine(**options, block_size=32, hash_unit=4)
    shared = tokens(40)
    engine.add(make_request("past", shared[:9], hash_unit=4), [STOP_TOKEN])
    engine.run()
    for name in ("one", "other"):
        engine.add(make_request(name, shared + tokens(40), hash_unit=4), [STOP_TOKEN])
    engine.run()
    assert [engine.finished[n].cached_tokens for n in ("one", "other")] == [8, 8]
    if options is RETAINED:
        assert engine.worker.errors == []
        return
    assert {error.request_id for error in engine.worker.errors} == {"other"}
    assert "attention page wrong" in engine.worker.errors[0].problem


@pytest.mark.parametrize("options", [STOCK, RETAINED], ids=["stock", "retained"])
def test_a_state_hashed_above_where_it_is(options):
    """A shared-prefix junction behind a hit that ends inside a block, where the
    backend exports prefill states (Mamba2, KDA)."""
    engine = make_engine(
        **options, block_size=64, hash_unit=16, num_prefill_checkpoint_blocks=1
    )
    shared = tokens(256)
    # Leaves a recurrent state at 160 tokens, and attention for more.
    engine.add(make_request("past", shared[:161], hash_unit=16), shared[161:])
    while len(engine.requests["past"].all_token_ids) < 256:
        engine.step()
    engine.add(make_request("next", shared + tokens(93), hash_unit=16), [STOP_TOKEN])
    audit = PrefixCacheAudit(engine)
    while not engine.requests["next"].is_finished():
        engine.step()
    assert engine.finished["next"].cached_tokens == 160
    problems = audit.problems()
    if options is RETAINED:
        assert problems == []
    else:
        assert any("for 256 tokens: holds State(num_tokens=224" in p for p in problems)


@pytest.mark.parametrize("options", [STOCK, RETAINED], ids=["stock", "retained"])
def test_a_state_hashed_above_where_it_is_by_an_interval(options):
    """The same with a positive retention interval, and no junction: the prompt's last
    chunk runs from inside a block over the end of an interval."""
    engine = make_engine(
        **options,
        block_size=64,
        hash_unit=16,
        num_prefill_checkpoint_blocks=1,
        retention_interval=128,
    )
    shared = tokens(97)
    for name, prompt in (("past", shared), ("next", shared + tokens(107))):
        engine.add(make_request(name, prompt, hash_unit=16), [STOP_TOKEN])
        audit = PrefixCacheAudit(engine)
        while not engine.requests[name].is_finished():
            engine.step()
            problems = audit.problems()
    assert engine.finished["next"].cached_tokens == 96
    if options is RETAINED:
        assert problems == []
    else:
        assert "for 128 tokens: holds State(num_tokens=96" in problems[0]


def test_stock_truncates_a_page_that_it_copies():
    """``copy_kv_cache_blocks_inplace`` copies the bytes of the Mamba view alone where
    that comes first: the end of an attention tail is lost after a sub-block hit."""
    outcomes = {}
    for copied_slots in (None, 20):
        engine = make_engine(
            Scheduler, block_size=32, hash_unit=4, copied_slots=copied_slots
        )
        prompt = tokens(29)
        for name in ("past", "next"):
            engine.add(make_request(name, prompt, hash_unit=4), [STOP_TOKEN])
            engine.run()
        assert engine.finished["next"].cached_tokens == 28
        outcomes[copied_slots] = [error.problem for error in engine.worker.errors]
    assert outcomes[None] == []
    assert outcomes[20] == ["attention page wrong at token 20"]


@pytest.mark.parametrize("options", [STOCK, RETAINED], ids=["stock", "retained"])
def test_a_session_goes_on_from_a_state_one_token_too_far(options):
    """Streaming input under asynchronous scheduling: the step in flight has consumed
    the token that vLLM drops between two pieces. Attention forgets it, a recurrent
    state cannot. Not repaired; nothing of a session is retained."""
    engine = make_engine(
        **options | {"cls": RETAINED_ASYNC if options is RETAINED else AsyncScheduler},
        block_size=32,
        hash_unit=4,
        async_scheduling=True,
    )
    session = make_request("session", tokens(10), hash_unit=4, resumable=True)
    engine.add(session, [*tokens(10), STOP_TOKEN])
    while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        engine.step()
    piece = make_request("session", tokens(10), hash_unit=4, resumable=True)
    engine.scheduler.add_request(piece)
    engine.worker.expect(session, [*tokens(5), STOP_TOKEN])
    engine.step()
    assert session.num_tokens == 30
    (error, *_) = engine.worker.errors
    assert (error.request_id, error.position) == ("session", 20)
    assert "initial state is State(num_tokens=21" in error.problem
