"""Each query against the same question asked of all rows in Python."""

from __future__ import annotations

import itertools

import pytest
import seeded_store
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from event_consumer import tables
from ui.connection import StoreConnection
from ui.queries import (
    COUNT_LIMIT,
    DEPTH_EDGES,
    RETAINED,
    SORTS,
    Queries,
    RequestFilter,
)


@pytest.fixture
def queries(store_url) -> Queries:
    return Queries(StoreConnection(store_url))


@pytest.fixture
def rows(store_url) -> list[dict]:
    """All requests, read without the queries under test."""
    engine = sa.create_engine(store_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        found = connection.execute(sa.select(tables.requests)).mappings().all()
    engine.dispose()
    return [dict(row) for row in found]


def computed(row) -> int | None:
    if row["num_prompt_tokens"] is None:
        return None
    return row["num_prompt_tokens"] - (row["num_cached_tokens"] or 0)


def matches(wanted: RequestFilter, row) -> bool:
    """The filter in plain Python."""
    outcome = RETAINED if row["retained_boundary"] is not None else ""
    ids = (row["request_id"], row["conversation_id"], row["session_id"] or "")
    checks = [
        not wanted.labels or row["label"] in wanted.labels,
        not wanted.engine_ids or row["engine_id"] in wanted.engine_ids,
        not wanted.models or row["model_name"] in wanted.models,
        not wanted.statuses or row["status"] in wanted.statuses,
        not wanted.limits or row["hit_limited_by"] in wanted.limits,
        not wanted.finish_reasons or row["finish_reason"] in wanted.finish_reasons,
        not wanted.outcomes
        or outcome in wanted.outcomes
        or row["no_checkpoint_reason"] in wanted.outcomes,
        wanted.since_ns is None or row["last_event_ns"] >= wanted.since_ns,
        wanted.until_ns is None or row["last_event_ns"] < wanted.until_ns,
        not wanted.min_recomputed or (computed(row) or 0) >= wanted.min_recomputed,
        not wanted.only_incomplete or row["incomplete"],
        not wanted.text or any(wanted.text.lower() in text.lower() for text in ids),
    ]
    return all(checks)


def some(values):
    return st.lists(st.sampled_from(values), max_size=2)


filters = st.builds(
    dict,
    labels=some(["arm-off", "arm-on", "prod-1", "prod-2", "nobody"]),
    outcomes=some([RETAINED, "length", "disabled", "preempted", "below_block"]),
    limits=some(["prompt_end", "attention", "recurrent_state"]),
    statuses=some(["open", "finished", "engine_lost"]),
    finish_reasons=some(["stop", "length", "abort"]),
    min_recomputed=st.sampled_from([0, 1, 500, 5000]),
    only_incomplete=st.booleans(),
    text=st.sampled_from(["", "chat-00", "reference", "turn-3", "100%", "_", "\\"]),
    since=st.sampled_from([None, 0.3, 0.9]),
    until=st.sampled_from([None, 0.5, 0.95]),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(given_filter=filters, sort=st.sampled_from(sorted(SORTS)))
def test_a_filter_finds_what_a_loop_finds(queries, rows, given_filter, sort):
    times = sorted(row["last_event_ns"] for row in rows)
    chosen = dict(given_filter)
    for name in ("since", "until"):
        share = chosen.pop(name)
        chosen[f"{name}_ns"] = None if share is None else times[int(share * len(times))]
    wanted = RequestFilter(**chosen)
    expected = [row for row in rows if matches(wanted, row)]
    found = queries.find_requests(wanted, sort=sort, limit=10_000)
    assert {r["request_id"] for r in found} == {r["request_id"] for r in expected}
    assert queries.count_requests(wanted) == len(expected)
    key = {
        "newest": lambda r: -r["last_event_ns"],
        "oldest": lambda r: r["last_event_ns"],
        "recomputed": lambda r: -(computed(r) if computed(r) is not None else -1),
        "reused": lambda r: (
            -(r["num_cached_tokens"] if r["num_cached_tokens"] is not None else -1)
        ),
        "prompt": lambda r: -(r["num_prompt_tokens"] or -1),
    }[sort]
    assert [key(r) for r in found] == sorted(key(r) for r in found)


def test_pages_do_not_overlap_and_cover_all(queries, rows):
    seen = []
    for offset in range(0, len(rows), 50):
        page = queries.find_requests(RequestFilter(), limit=50, offset=offset)
        assert len(page) <= 50
        seen += [row["request_id"] for row in page]
    assert sorted(seen) == sorted(row["request_id"] for row in rows)


def test_a_wildcard_is_searched_for_as_it_is(queries):
    assert queries.count_requests(RequestFilter(text="%")) == 0
    assert queries.count_requests(RequestFilter(text="chat_0")) == 0


def test_a_request_is_found_by_either_id(queries, rows):
    for row in rows[:30]:
        by_external = queries.requests_by_id(row["external_request_id"])
        by_core = queries.requests_by_id(row["request_id"])
        assert [r["request_id"] for r in by_external] == [row["request_id"]]
        assert [r["request_id"] for r in by_core] == [row["request_id"]]
    assert queries.requests_by_id("nothing") == []
    assert queries.requests_by_id("") == []


def test_breakdown_sums_to_the_rows(queries, rows):
    cells = queries.breakdown(RequestFilter())
    admitted = [r for r in rows if r["num_cached_tokens"] is not None]
    assert cells.total("num_requests") == len(rows)
    assert cells.total("prompt") == sum(r["num_prompt_tokens"] or 0 for r in admitted)
    assert cells.total("cached") == sum(r["num_cached_tokens"] for r in admitted)
    assert cells.total("output") == sum(r["num_output_tokens"] or 0 for r in rows)
    outcomes = dict(cells.outcomes())
    kept = sum(r["retained_boundary"] is not None for r in rows)
    assert outcomes[RETAINED] == kept
    assert sum(outcomes.values()) == sum(r["status"] != "open" for r in rows)
    edges = [*DEPTH_EDGES, float("inf")]
    assert cells.depths() == [
        sum(low <= r["num_cached_tokens"] < high for r in admitted)
        for low, high in itertools.pairwise(edges)
    ]
    assert cells.by_status("open") == 4


@pytest.mark.parametrize("num_buckets", [1, 7, 90])
def test_buckets_of_time(queries, rows, num_buckets):
    start = min(r["last_event_ns"] for r in rows)
    width = (max(r["last_event_ns"] for r in rows) - start) // num_buckets + 1
    found = queries.tokens_over_time(RequestFilter(), start, width)
    expected: dict[int, list[int]] = {}
    for row in rows:
        if row["num_cached_tokens"] is not None:
            cell = expected.setdefault((row["last_event_ns"] - start) // width, [0, 0])
            cell[0] += row["num_prompt_tokens"]
            cell[1] += row["num_cached_tokens"]
    assert {r["bucket"]: [r["prompt"], r["cached"]] for r in found} == expected


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_pinned_blocks_at_the_end_of_each_bucket(queries, store_url, share):
    """Counted one by one: what was pinned and not yet released at that moment."""
    engine = sa.create_engine(store_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        pins = connection.execute(sa.select(tables.checkpoints)).mappings().all()
    engine.dispose()
    first = min(p["pinned_ns"] for p in pins)
    last = max(p["last_event_ns"] for p in pins)
    start = first + int((last - first) * share)
    width = (last - start) // 40 + 1
    levels = queries.pinned_over_time(start, width, 40, everything=share == 0.0)
    for index, level in enumerate(levels):
        end = start + (index + 1) * width
        held = 0
        for pin in pins:
            released = pin["published_ns"] or pin["discarded_ns"]
            if released is None and pin["stage"] == "gone":
                released = pin["last_event_ns"]
            if pin["pinned_ns"] < end and (released is None or released >= end):
                held += pin["num_blocks"]
        assert level == held, index
    assert levels[-1] == queries.pinned_now()["blocks"] == 12


def test_the_reference_s_table(queries):
    """vLLM PR 50551: 23056 of 36254 without, 32736 of 34550 with retention."""
    for label, expected in seeded_store.REFERENCE.items():
        wanted = RequestFilter(labels=(label,))
        for one_conversation in (False, True):
            turns = queries.by_turn(wanted, one_conversation=one_conversation)
            assert [
                (t["cached"], t["prompt"], t["completion"]) for t in turns
            ] == expected


def test_turns_are_summed_over_conversations(queries, rows):
    wanted = RequestFilter(labels=("prod-1",))
    turns = queries.by_turn(wanted, one_conversation=False)
    mine = [r for r in rows if r["label"] == "prod-1"]
    conversations = {r["conversation_id"] for r in mine}
    assert turns[0]["num_requests"] == len(conversations)
    assert sum(t["num_requests"] for t in turns) == len(mine)
    assert sum(t["prompt"] for t in turns) == sum(r["num_prompt_tokens"] for r in mine)


def test_conversations_sum_their_turns(queries, rows):
    found = queries.conversations(RequestFilter(), limit=10)
    assert len(found) == 10
    assert [r["last_ns"] for r in found] == sorted(
        (r["last_ns"] for r in found), reverse=True
    )
    for conversation in found:
        mine = [
            r
            for r in rows
            if r["conversation_id"] == conversation["conversation_id"]
            and r["label"] == conversation["label"]
        ]
        assert conversation["num_turns"] == len(mine)
        assert conversation["cached"] == sum(r["num_cached_tokens"] or 0 for r in mine)
        turns = queries.turns(conversation["conversation_id"], conversation["label"])
        assert {t["request_id"] for t in turns} == {r["request_id"] for r in mine}
        arrivals = [t["arrival_ns"] for t in turns]
        assert arrivals == sorted(arrivals)


def test_a_turn_leads_to_the_turn_before_and_back(queries):
    """The links of the Request page: source and reusers are each other's inverse."""
    turns = queries.turns("reference-dialog-arm-on")
    for before, turn in itertools.pairwise(turns):
        assert queries.source_of(turn)["request_id"] == before["request_id"]
        assert [r["request_id"] for r in queries.reusers_of(before)] == [
            turn["request_id"]
        ]
    assert queries.source_of(turns[0]) is None


def test_use_of_published_checkpoints(queries):
    use = queries.published_use(None)
    assert use["published"] > use["hit"] > 0
    assert use["evicted"] >= use["evicted_unused"] > 0
    assert queries.published_use(2**62)["published"] == 0


def test_checkpoints_of_an_engine_that_stopped_were_used_all_the_same(tmp_path):
    """As after the demo: what was published is gone, and still was hit."""
    now = 10**18
    rows = seeded_store.Rows()
    arms = [seeded_store.engine_row(n, f"arm-{n}", now) for n in (1, 2)]
    made = [seeded_store.request_row(arm, f"r{n}", now) for n, arm in enumerate(arms)]
    gone = {"stage": "gone", "published_ns": now, "pinned_ns": now - 1}
    seeded_store.checkpoint_row(rows, made[0], 64, **gone, num_hits=2)
    seeded_store.checkpoint_row(rows, made[0], 80, **gone)
    seeded_store.checkpoint_row(rows, made[0], 96, stage="gone", pinned_ns=now - 1)
    seeded_store.checkpoint_row(rows, made[1], 64, stage="evicted", published_ns=now)
    seeded_store.checkpoint_row(rows, made[1], 80, stage="pinned", pinned_ns=now - 5)
    rows.requests += made
    url = f"sqlite:///{tmp_path}/stopped.db"
    seeded_store.write(url, arms, rows, [], [])
    queries = Queries(StoreConnection(url))

    def use(*labels):
        found = queries.published_use(None, labels)
        return tuple(found[n] for n in ("published", "hit", "evicted_unused"))

    assert use() == (3, 1, 1)
    assert use("arm-1") == (2, 1, 0)
    assert use("arm-2") == (1, 0, 1)
    assert use("nobody") == (0, 0, 0)
    assert queries.pinned_now(["arm-1"])["blocks"] == 0
    assert queries.pinned_now(["arm-2"])["blocks"] == queries.pinned_now()["blocks"] > 0
    for labels, level in ((["arm-1"], 0), (["arm-2"], 3), ([], 3)):
        levels = queries.pinned_over_time(
            now - 10, 100, 1, everything=True, labels=labels
        )
        assert levels == [level], labels


def test_a_count_is_bounded(seeded_url, monkeypatch):
    monkeypatch.setattr("ui.queries.COUNT_LIMIT", 10)
    assert COUNT_LIMIT > 10
    counted = Queries(StoreConnection(seeded_url)).count_requests(RequestFilter())
    assert counted == 11


def test_a_filter_of_the_newest_walks_an_index(seeded_url):
    """No sort of all rows for the page that is opened first."""
    with StoreConnection(seeded_url).read() as connection:
        statement = (
            sa.select(tables.requests)
            .order_by(SORTS["newest"], tables.requests.c.request_id)
            .limit(50)
        )
        sql = str(statement.compile(compile_kwargs={"literal_binds": True}))
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}").all()
    assert "ix_requests_last_event" in str(plan)
