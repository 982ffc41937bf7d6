"""Events in, records out: whole lives, lives with holes, and lives cut in two."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycles import Lifecycles, batches

from event_consumer import ledger as ledger_module
from event_consumer import tables
from event_consumer.ledger import Ledger
from event_consumer.records import CheckpointRecord, RequestRecord, StreamRecord
from event_consumer.store import ChangeSet, Store
from vllm_fork.events import (
    CheckpointDiscarded,
    CheckpointEvicted,
    CheckpointPinned,
    CheckpointPromoted,
    CheckpointPublished,
    EngineStarted,
    EngineStopped,
    EventBatch,
    EventsDropped,
    PrefixReused,
    RequestFinished,
)

SECOND = 1_000_000_000


class Told:
    """A ledger, and everything that it has handed out."""

    def __init__(self, engine_id: str = "e", endpoint: str = "tcp://here") -> None:
        self.ledger = Ledger()
        self.engine_id = engine_id
        self.endpoint = endpoint
        self.requests: dict[str, RequestRecord] = {}
        self.checkpoints: dict[int, CheckpointRecord] = {}
        self.engines: dict[str, Any] = {}
        self.closed: list[Any] = []
        self.evicted: list[CheckpointRecord] = []
        self.now = 0
        self.seq = -1

    def tell(self, *events: Any, engine_id: str | None = None) -> int:
        batch = EventBatch(
            0.0, list(events), 0, engine_id=engine_id or self.engine_id, label="on"
        )
        self.seq += 1
        dropped = self.ledger.apply(self.endpoint, self.seq, batch, list(events))
        self.collect()
        return dropped

    def collect(self) -> None:
        engines, requests, checkpoints, hits = self.ledger.take_changes()
        checkpoints += hits
        self.engines |= {engine.engine_id: engine for engine in engines}
        self.requests |= {request.request_id: request for request in requests}
        self.checkpoints |= {each.checkpoint_id: each for each in checkpoints}
        self.closed += self.ledger.take_closed()
        self.evicted += self.ledger.take_evicted()

    def at(self, kind: type, request_id: str | None = None, **fields: Any) -> Any:
        """One event, a second after the former one."""
        self.now += SECOND
        if request_id is not None:
            fields |= {"request_id": request_id}
        return kind(time_unix_ns=self.now, monotonic_ns=self.now, **fields)

    def admit(self, name: str, **fields: Any) -> Any:
        fields = {"num_prompt_tokens": 100, "num_cached_tokens": 0} | fields
        return self.at(PrefixReused, name, **fields)

    def finish(self, name: str, **fields: Any) -> Any:
        fields = {
            "num_prompt_tokens": 100,
            "num_output_tokens": 20,
            "num_cached_tokens": 0,
            "finish_reason": "stop",
        } | fields
        return self.at(RequestFinished, name, **fields)

    def stage(self, kind: type, name: str, number: int, **fields: Any) -> Any:
        fields = {"boundary": 96 * number, "boundary_kind": "decode_block"} | fields
        if kind is CheckpointPinned:
            fields["num_blocks"] = 1
        return self.at(kind, name, checkpoint_id=number, **fields)

    def publish(self, name: str, number: int, **fields: Any) -> list[Any]:
        return [
            self.stage(CheckpointPinned, name, number, **fields),
            self.stage(CheckpointPromoted, name, number, **fields),
            self.stage(CheckpointPublished, name, number, **fields),
        ]


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_life_from_admission_to_eviction(told):
    told.tell(
        told.admit("a", session_id="s", arrival_unix_ns=5, hit_limited_by="attention")
    )
    told.tell(*told.publish("a", 1)[:2])
    assert told.checkpoints[1].stage == "promoted"
    told.tell(
        told.stage(CheckpointPinned, "a", 2),
        told.stage(
            CheckpointPromoted,
            "a",
            2,
            supersedes_checkpoint_id=1,
            supersedes_boundary=96,
        ),
        told.stage(CheckpointDiscarded, "a", 1, reason="superseded"),
        told.stage(CheckpointPublished, "a", 2, block_hash=b"\xab\xcd"),
        told.finish("a", retained_boundary=192, num_superseded=1, stop_reason=7),
    )
    request = told.requests["a"]
    assert (request.status, request.incomplete) == ("finished", False)
    assert (request.arrival_ns, request.admitted_ns) == (5, SECOND)
    assert request.conversation_id == "s"
    assert request.stop_reason == "7"
    assert len(request.trace_id) == 32
    assert len(request.span_id) == 16
    first, second = told.checkpoints[1], told.checkpoints[2]
    assert (first.stage, first.discard_reason) == ("discarded", "superseded")
    assert (second.stage, second.block_hash) == ("published", "abcd")
    assert second.supersedes_checkpoint_id == 1
    assert second.trace_id == request.trace_id
    ((closed, checkpoints, source),) = told.closed
    assert closed == request
    assert [c.checkpoint_id for c in checkpoints] == [1, 2]
    assert source is None
    told.tell(
        told.stage(CheckpointEvicted, "a", 2, reason="lru", age_s=1.0, num_hits=4)
    )
    assert (second.stage, second.eviction_reason, second.num_hits) == (
        "evicted",
        "lru",
        4,
    )
    assert told.evicted == [second]
    assert told.ledger._epochs["e"].lives == {}


def test_a_hit_is_counted_and_handed_out_with_the_request(told):
    told.tell(told.admit("a"), *told.publish("a", 1), told.finish("a"))
    source = {
        "source_request_id": "a",
        "source_checkpoint_id": 1,
        "source_boundary": 96,
    }
    told.tell(told.admit("b", num_cached_tokens=96, **source), told.finish("b"))
    assert told.checkpoints[1].num_hits == 1
    assert told.closed[1].source.checkpoint_id == 1
    assert told.requests["b"].source_boundary == 96


def test_the_chain_of_reuse_is_the_conversation(told):
    """Without session ids: through any number of turns, to its first request."""
    told.tell(told.admit("a"), *told.publish("a", 1), told.finish("a"))
    for number, (former, name) in enumerate(["ab", "bc", "cd"], 1):
        source = {"source_request_id": former, "source_checkpoint_id": number}
        told.tell(
            told.admit(name, **source),
            *told.publish(name, number + 1),
            told.finish(name),
        )
    assert {r.conversation_id for r in told.requests.values()} == {"e/a"}


def test_a_shared_prompt_joins_no_conversations(told):
    """What was hit there is not an answer that goes on."""
    told.tell(told.admit("a"), told.finish("a"))
    told.tell(told.admit("b", source_request_id="a", source_kind="shared_prefix"))
    assert told.requests["b"].conversation_id == "e/b"


def test_a_session_is_a_conversation_and_passes_on(told):
    told.tell(told.admit("a", session_id="s"), *told.publish("a", 1, session_id="s"))
    told.tell(told.finish("a", session_id="s"))
    source = {"source_request_id": "a", "source_checkpoint_id": 1}
    told.tell(told.admit("b", **source), told.admit("c", session_id="t", **source))
    assert told.requests["b"].conversation_id == "s"
    assert told.requests["c"].conversation_id == "t"


def test_a_resumed_admission_is_not_the_reuse_depth(told):
    told.tell(told.admit("a", num_cached_tokens=32))
    told.tell(told.admit("a", num_cached_tokens=96, resumed=True))
    request = told.requests["a"]
    assert (request.num_cached_tokens, request.num_preemptions) == (32, 1)


def test_a_request_that_was_never_admitted_is_whole(told):
    told.tell(
        told.finish("a", num_output_tokens=0, no_checkpoint_reason="never_admitted")
    )
    assert not told.requests["a"].incomplete


@pytest.mark.parametrize(
    "first",
    [
        lambda told: told.stage(CheckpointPinned, "a", 1),
        lambda told: told.stage(CheckpointPublished, "a", 1),
        lambda told: told.admit("a", resumed=True),
        lambda told: told.finish("a"),
    ],
)
def test_a_life_seen_from_its_middle_says_so(told, first):
    told.tell(first(told))
    assert told.requests["a"].incomplete


def test_a_lost_range_marks_what_was_open(told):
    told.tell(told.admit("a"), told.finish("a"), told.admit("b"))
    told.ledger.range_lost("e")
    told.tell(told.admit("c"))
    incomplete = {name: r.incomplete for name, r in told.requests.items()}
    assert incomplete == {"a": False, "b": True, "c": False}


def test_dropped_events_are_counted_and_mark_what_was_open(told):
    told.tell(told.admit("a"))
    assert told.tell(told.at(EventsDropped, count=3)) == 3
    assert told.engines["e"].events_dropped == 3
    assert told.requests["a"].incomplete


def test_what_comes_back_is_told_again_under_the_same_ids(told):
    """As lost when the engine goes, and at its true end (docs/traces.md)."""
    told.tell(told.admit("a"), *told.publish("a", 1)[:2])
    told.ledger.engine_lost("e")
    told.ledger.engine_back("e")
    told.collect()
    told.tell(told.publish("a", 1)[2], told.finish("a", retained_boundary=96))
    lost, ended = told.closed
    assert (lost.request.status, ended.request.status) == ("engine_lost", "finished")
    ids = [
        (each.request.trace_id, each.request.span_id, each.checkpoints[0].span_id)
        for each in (lost, ended)
    ]
    assert ids[0] == ids[1]
    assert [c.stage for c in ended.checkpoints] == ["published"]
    assert list(told.requests) == ["a"]


def test_an_engine_lost_takes_everything_along_and_may_bring_it_back(told):
    told.tell(told.admit("a"), *told.publish("a", 1), told.finish("a"))
    told.tell(told.admit("b"), *told.publish("b", 2)[:2])
    told.ledger.engine_lost("e")
    told.ledger.engine_lost("e")
    told.collect()
    assert told.engines["e"].status == "lost"
    assert told.requests["b"].status == "engine_lost"
    assert {c.stage for c in told.checkpoints.values()} == {"gone"}
    assert [closed.request.status for closed in told.closed] == [
        "finished",
        "engine_lost",
    ]
    told.tell(told.stage(CheckpointPublished, "b", 2))
    assert told.engines["e"].status == "running"
    assert told.requests["b"].status == "open"
    assert {c.stage for c in told.checkpoints.values()} == {"published"}
    told.tell(told.finish("b"))
    assert told.requests["b"].status == "finished"


def test_a_new_epoch_at_the_same_endpoint_ends_the_former(told):
    told.tell(told.admit("a"))
    told.tell(told.admit("a"), engine_id="f")
    assert told.engines["e"].status == "lost"
    assert told.engines["f"].status == "running"
    assert told.closed[0].request.engine_id == "e"


def test_an_engine_that_stopped_is_not_lost(told):
    told.tell(told.admit("a"), *told.publish("a", 1), told.finish("a"))
    told.tell(told.at(EngineStopped))
    told.ledger.engine_lost("e")
    told.collect()
    assert told.engines["e"].status == "stopped"
    assert told.checkpoints[1].stage == "gone"


def test_the_engine_says_how_it_runs(told):
    told.tell(
        told.at(
            EngineStarted,
            vllm_version="0.32.0",
            fork_version="1",
            retention="off",
            retention_reason="not hybrid",
            publish_on=["stop", "abort"],
            block_size=16,
        )
    )
    engine = told.engines["e"]
    assert (engine.retention, engine.retention_reason) == ("off", "not hybrid")
    assert (engine.publish_on, engine.label) == ("abort,stop", "on")


def test_a_request_waits_for_the_end_of_its_checkpoints(told):
    told.tell(told.admit("a"), *told.publish("a", 1)[:2], told.finish("a"))
    assert told.closed == []
    told.tell(told.stage(CheckpointPublished, "a", 1))
    assert told.closed[0].checkpoints[0].stage == "published"


def test_but_not_for_ever(told):
    told.tell(told.admit("a"), *told.publish("a", 1)[:2], told.finish("a"))
    told.now += ledger_module.LINGER_NS
    told.tell(told.admit("b"))
    assert told.closed[0].checkpoints[0].stage == "promoted"


def test_what_is_handed_out_does_not_change_afterwards(told):
    told.tell(told.admit("a"), *told.publish("a", 1), told.finish("a"))
    (closed,) = told.closed
    source = {"source_request_id": "a", "source_checkpoint_id": 1}
    told.tell(told.admit("b", **source))
    assert closed.checkpoints[0].num_hits == 0


def test_memory_is_bounded_whatever_is_lost(told, monkeypatch):
    """Only beginnings: every end was lost."""
    monkeypatch.setattr(ledger_module, "MAX_OPEN_REQUESTS", 50)
    monkeypatch.setattr(ledger_module, "MAX_RECENT", 50)
    told.tell(
        told.at(
            EngineStarted,
            vllm_version="0",
            fork_version="0",
            retention="on",
            num_blocks=20,
        )
    )
    for number in range(1, 300):
        told.tell(told.admit(f"open {number}"))
        told.tell(told.admit(f"r {number}"), *told.publish(f"r {number}", number))
        told.tell(told.finish(f"r {number}"))
    epoch = told.ledger._epochs["e"]
    assert len(epoch.lives) in (49, 50)
    assert len(epoch.recent) == 50
    assert len(epoch.live) == 40
    assert told.requests["open 1"].incomplete
    forgotten = told.checkpoints[1]
    assert (forgotten.stage, forgotten.eviction_reason) == ("evicted", "unobserved")


def test_a_forgotten_endpoint_leaves_nothing(told):
    told.tell(told.admit("a"), *told.publish("a", 1))
    told.ledger.forget(told.endpoint)
    told.collect()
    assert told.requests["a"].status == "engine_lost"
    assert told.ledger._epochs == {}


# -- whole histories ---------------------------------------------------------


def history(seed: int, num_events: int = 1_500, size: int = 7) -> list[list[Any]]:
    return list(
        batches(Lifecycles(seed=seed, concurrency=12, cache=20), num_events, size)
    )


def final(told: Told) -> tuple[Any, Any]:
    return told.requests, told.checkpoints


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_every_checkpoint_ends_once_and_every_request_is_whole(seed):
    told = Told()
    for batch in history(seed):
        told.tell(*batch)
    names = [closed.request.request_id for closed in told.closed]
    assert len(names) == len(set(names))
    ended = {n for n, r in told.requests.items() if r.status == "finished"}
    assert set(names) == ended
    assert not any(request.incomplete for request in told.requests.values())
    for checkpoint in told.checkpoints.values():
        ends = (checkpoint.published_ns, checkpoint.discarded_ns)
        assert ends.count(None) == (
            2 if checkpoint.stage in ("pinned", "promoted") else 1
        )
    for name in ended:
        request = told.requests[name]
        mine = [c for c in told.checkpoints.values() if c.request_id == name]
        published = max((c.boundary for c in mine if c.published_ns), default=None)
        assert request.retained_boundary == published


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_batch_told_twice_changes_nothing(seed):
    once, twice = Told(), Told()
    for batch in history(seed, 600):
        once.tell(*batch)
        twice.tell(*batch)
        twice.seq -= 1
        twice.tell(*batch)
    assert final(once) == final(twice)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.sampled_from([0.02, 0.2, 0.7]))
def test_whatever_is_missing_is_admitted(seed, share):
    """Batches vanish; every request that missed an event of its own says so."""
    rng = random.Random(seed)
    told = Told()
    whole = Told()
    for batch in history(seed, 600):
        whole.tell(*batch)
        if rng.random() < share and type(batch[0]) is not EngineStarted:
            told.ledger.range_lost("e")
            continue
        told.tell(*batch)
    for name, request in told.requests.items():
        if request.status == "finished" and not request.incomplete:
            expected = whole.requests[name]
            assert request.num_cached_tokens == expected.num_cached_tokens
            assert request.retained_boundary == expected.retained_boundary
    assert len(told.ledger._epochs["e"].lives) <= len(whole.requests)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 80), max_size=4))
def test_a_ledger_goes_on_from_the_store(seed, cuts, tmp_path_factory):
    """Cut anywhere and restored, the histories end in the same rows."""
    folder = tmp_path_factory.mktemp("cut")
    stores = [Store(f"sqlite:///{folder}/{name}.db") for name in ("whole", "cut")]
    ledgers = [Ledger(), Ledger()]
    closed: list[list[Any]] = [[], []]
    for number, batch in enumerate(history(seed, 600)):
        stream = StreamRecord(endpoint="here", engine_id="e", applied_seq=number)
        for store, ledger, ended in zip(stores, ledgers, closed, strict=True):
            sent = EventBatch(0.0, batch, 0, engine_id="e")
            ledger.apply("here", number, sent, batch)
            changed = ledger.take_changes()
            ended += ledger.take_closed()
            store.commit(
                ChangeSet.of(
                    **changed._asdict(),
                    streams=[stream],
                )
            )
        if number in cuts:
            ledgers[1] = Ledger()
            ledgers[1].restore(stores[1].load(["here"]))
    found = []
    for store in stores:
        with store.reading() as connection:
            found.append(
                [
                    connection.execute(
                        table.select().order_by(*table.primary_key)
                    ).all()
                    for table in (tables.engines, tables.requests, tables.checkpoints)
                ]
            )
        store.close()
    assert found[0] == found[1]
    sources = [
        [(c.request, c.source and c.source.checkpoint_id) for c in each]
        for each in closed
    ]
    assert sources[0] == sources[1]
    assert [[c.checkpoint_id for c in each.checkpoints] for each in closed[0]] == [
        [c.checkpoint_id for c in each.checkpoints] for each in closed[1]
    ]
