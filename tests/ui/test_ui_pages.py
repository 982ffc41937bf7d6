"""Each page in each state, run by ``AppTest``."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import page_content
import pytest
import seeded_store
import sqlalchemy as sa

from event_consumer import tables
from ui import downloads, reasons, settings

PAGES = ("overview", "requests", "request", "conversations", "compare", "health")
HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "![x](http://evil.example/x.png)",
    "[click](javascript:alert(1))",
    ":red[boom] $$x^2$$ `code` **bold**",
    "a&b?request=other#frag%20/../..",
    "=HYPERLINK(1)",
    "tab\tnewline\nbell\x07",
    "\u202egnp.exe",
    "'; DROP TABLE requests; --",
    "x" * 2000,
    "日本語 🐙",
)


def add(url: str, requests=(), checkpoints=(), engines=(), streams=(), gaps=()) -> None:
    """Write rows into a store that is there."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for table, rows in (
            (tables.engines, engines),
            (tables.requests, requests),
            (tables.checkpoints, checkpoints),
            (tables.streams, streams),
            (tables.gaps, gaps),
        ):
            if rows:
                connection.execute(sa.insert(table), list(rows))
    engine.dispose()


@pytest.fixture
def engine(empty_url):
    """One engine in an otherwise empty store."""
    row = seeded_store.engine_row(1, "prod", 10**18)
    add(empty_url, engines=[row])
    return row


# -- every page -----------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_a_full_store(open_page, seeded_url, page):
    at = open_page(seeded_url, page)
    assert not at.exception
    assert "gapped, batches are being asked for again" in page_content.texts(at)
    assert at.metric or page_content.tables(at)


@pytest.mark.parametrize("page", PAGES)
def test_an_empty_store_says_why_and_what_to_run(open_page, empty_url, page):
    at = open_page(empty_url, page)
    assert not at.exception
    assert not page_content.tables(at)
    commands = [code.value for code in at.code]
    assert len(commands) == 1
    assert commands[0].split()[0] in ("vllm-fork", "event-consumer", "make")


@pytest.mark.parametrize("page", PAGES)
def test_a_missing_store_says_what_to_run(open_page, tmp_path, page):
    at = open_page(f"sqlite:///{tmp_path / 'none.db'}", page)
    assert not at.exception
    assert "Nothing here yet" in page_content.texts(at)
    assert at.code[0].value.startswith("event-consumer run --store sqlite:///")


@pytest.mark.parametrize("page", PAGES)
def test_a_store_that_cannot_be_read(open_page, tmp_path, page):
    path = tmp_path / "notes.db"
    path.write_text("not a database " * 100)
    at = open_page(f"sqlite:///{path}", page)
    assert not at.exception
    assert "The store cannot be read" in page_content.texts(at)
    assert "is not an SQLite database" in page_content.texts(at)


def test_a_wrong_url_does_not_tell_the_password(open_page):
    at = open_page("mysql://me:hunter2@db/x", "requests")
    assert not at.exception
    assert "hunter2" not in page_content.texts(at)
    assert "'mysql' is not known" in page_content.texts(at)


def test_the_page_comes_alive_with_the_store(open_page, tmp_path):
    url = f"sqlite:///{tmp_path / 'late.db'}"
    at = open_page(url, "requests")
    assert "Nothing here yet" in page_content.texts(at)
    seeded_store.seed(url, num_requests=20)
    at.run()
    assert page_content.table(at, "Requests")


def test_a_figure_without_a_number_says_why(open_page, empty_url, engine):
    """A request that nobody admitted, and that has not ended."""
    now = time.time_ns()
    row = seeded_store.request_row(engine, "waits", now, status="open")
    add(empty_url, requests=[row])
    at = open_page(empty_url, "overview")
    assert not at.exception
    shown = {metric.label: (metric.value, metric.delta) for metric in at.metric}
    assert shown["Hit rate"] == ("—", "none admitted")
    assert shown["Left a checkpoint"] == ("—", "none ended")
    assert shown["Checkpoints used"] == ("—", "none published")
    for label, (value, delta) in shown.items():
        assert value != "—" or delta, label


def test_no_change_points_nowhere(open_page, empty_url, engine):
    """An engine beside itself is neither better nor worse."""
    row = seeded_store.request_row(
        engine, "r", time.time_ns(), num_prompt_tokens=100, num_cached_tokens=40
    )
    add(empty_url, requests=[row])
    at = open_page(empty_url, "compare")
    assert not at.exception
    deltas = {metric.delta: metric.proto for metric in at.metric if metric.delta}
    assert set(deltas) == {"+0.0 points", "+0%"}
    for proto in deltas.values():
        assert proto.color == proto.GRAY
        assert proto.direction == proto.NONE


@pytest.mark.parametrize("page", PAGES)
def test_every_number_says_what_it_counts(open_page, seeded_url, page):
    params = {"request": "chatcmpl-arm-on-turn-1"} if page == "request" else {}
    at = open_page(seeded_url, page, **params)
    for metric in at.metric:
        assert metric.help, metric.label
    for caption, data in page_content.tables(at).items():
        for column in data["columns"]:
            assert column["help"], (caption, column["label"])


def test_the_overview_of_a_range_says_how_it_changed(open_page, tmp_path):
    """Half of the prompt reused in the last hour, a quarter in the hour before."""
    url = f"sqlite:///{tmp_path / 'change.db'}"
    engine = seeded_store.engine_row(1, "prod", 0)
    rows = seeded_store.Rows()
    for ago_s, cached in ((60, 500), (5400, 250), (90_000, 900)):
        at = time.time_ns() - ago_s * seeded_store.SECOND
        rows.requests.append(
            seeded_store.request_row(
                engine,
                f"chatcmpl-{ago_s}",
                at,
                num_prompt_tokens=1000,
                num_cached_tokens=cached,
            )
        )
    seeded_store.write(url, [engine], rows, [], [])
    at = open_page(url, "overview", range="1 h")
    (rate,) = [m for m in at.metric if m.label == "Hit rate"]
    assert (rate.value, rate.delta) == ("50.0%", "+25.0 points")
    at = open_page(url, "overview")
    (rate,) = [m for m in at.metric if m.label == "Hit rate"]
    assert (rate.value, rate.delta) == ("55.0%", "")


# -- requests -------------------------------------------------------------


def test_requests_are_listed_with_reuse_and_reason(open_page, seeded_url):
    at = open_page(seeded_url, "requests", q="arm-on-turn")
    rows = {row["name"]: row for row in page_content.table(at, "Requests")}
    assert len(rows) == 5
    row = rows["chatcmpl-arm-on-turn-1"]
    texts = [cell.get("text") for cell in row["cells"]]
    assert "3,168 of 3,634 · 87.2%" in texts
    assert "7,392" in texts
    detail = {i["label"]: i["text"] for i in row["detail"]["items"]}
    assert "3,168 of 3,634 prompt tokens (87.2%) were reused" in detail["Reused"]
    assert "next turn" in detail["Left"]


def test_no_row_is_without_a_reason(open_page, seeded_url):
    """Each row's last cell and its detail say what was left, or why nothing was."""
    at = open_page(seeded_url, "requests")
    for page in range(1, 9):
        at.number_input(key="page").set_value(page).run()
        for row in page_content.table(at, "Requests"):
            left = {i["label"]: i["text"] for i in row["detail"]["items"]}["Left"]
            assert len(left) > 30
            assert row["cells"][-1]["text"]


def test_filters_come_from_the_address(open_page, seeded_url):
    """What Overview links to: the words of the outcome, not its code."""
    short = reasons.no_checkpoint("length").short
    at = open_page(seeded_url, "requests", outcome=short, label="prod-1")
    assert at.multiselect(key="outcome").value == ["length"]
    rows = page_content.table(at, "Requests")
    assert rows
    for row in rows:
        assert row["cells"][-1]["text"] == short
        assert row["cells"][2]["text"] == "prod-1"


def test_a_filter_without_a_match_says_so(open_page, seeded_url):
    at = open_page(seeded_url, "requests", q="nothing is called this")
    assert "No request matches these filters" in page_content.texts(at)
    assert "**0** requests" in page_content.texts(at)
    at.button[0].click().run()
    assert not at.exception
    assert at.text_input(key="q").value == ""
    assert len(page_content.table(at, "Requests")) == 50


def test_pages_of_the_list(open_page, seeded_url):
    at = open_page(seeded_url, "requests")
    first = {row["key"] for row in page_content.table(at, "Requests")}
    at.number_input(key="page").set_value(2).run()
    second = {row["key"] for row in page_content.table(at, "Requests")}
    assert len(first) == len(second) == 50
    assert not first & second


def test_a_new_filter_begins_at_its_first_page(open_page, seeded_url):
    at = open_page(seeded_url, "requests")
    at.number_input(key="page").set_value(5).run()
    at.text_input(key="q").set_value("arm-on-turn").run()
    assert not at.exception
    assert len(page_content.table(at, "Requests")) == 5
    at.text_input(key="q").set_value("").run()
    assert at.number_input(key="page").value == 1


def test_a_page_that_is_no_more_becomes_the_last(open_page, tmp_path):
    """Retention by age removes rows under the reader of the last page."""
    url = f"sqlite:///{tmp_path / 'shrinks.db'}"
    seeded_store.seed(url, num_requests=120)
    at = open_page(url, "requests")
    at.number_input(key="page").set_value(3).run()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        newest = (
            sa.select(tables.requests.c.request_id)
            .order_by(tables.requests.c.last_event_ns.desc())
            .limit(60)
        )
        connection.execute(
            sa.delete(tables.requests).where(
                tables.requests.c.request_id.not_in(newest.scalar_subquery())
            )
        )
    at.run()
    assert not at.exception
    assert at.number_input(key="page").value == 2
    assert len(page_content.table(at, "Requests")) == 10


def test_downloads():
    rows = [{"a": "=1+1", "b": None, "c": 'x,"y"\n'}, {"a": "ok", "b": 3, "c": ""}]
    read = list(csv.DictReader(io.StringIO(downloads.as_csv(rows), newline="")))
    assert read[0] == {"a": "'=1+1", "b": "", "c": 'x,"y"\n'}
    assert json.loads(downloads.as_json(rows)) == rows
    assert downloads.as_csv([]) == ""


# -- one request ----------------------------------------------------------


@pytest.mark.parametrize("by", ["external_request_id", "request_id"])
def test_a_request_by_either_id(open_page, seeded_url, by):
    with sa.create_engine(seeded_url).connect() as connection:
        statement = sa.select(tables.requests.c[by]).where(
            tables.requests.c.external_request_id == "chatcmpl-arm-on-turn-1"
        )
        wanted = connection.scalar(statement)
    at = open_page(seeded_url, "request", request=wanted)
    assert not at.exception
    assert page_content.figures(at) == {
        "Prompt": "3,634",
        "Reused": "3,168",
        "Prefilled": "466",
        "Decoded": "4,080",
        "Retained": "7,392",
        "Queued": page_content.figures(at)["Queued"],
        "Took": page_content.figures(at)["Took"],
    }
    source = page_content.table(at, "The request it resumed from")
    assert [row["name"] for row in source] == ["chatcmpl-arm-on-turn-0"]
    reusers = page_content.table(at, "The requests that resumed")
    assert [row["name"] for row in reusers] == ["chatcmpl-arm-on-turn-2"]
    stages = page_content.table(at, "Checkpoints")
    assert [row["cells"][0]["text"] for row in stages] == [
        "7,392",
        "6,336",
        "5,280",
        "4,224",
    ]
    assert [row["cells"][2]["text"] for row in stages] == [
        "published",
        "discarded",
        "discarded",
        "discarded",
    ]
    assert stages[1]["cells"][3]["text"] == "superseded"


def test_each_reason_in_words(open_page, empty_url, engine):
    """A page for each reason that there is, and for two that there are not yet."""
    codes = [*reasons.NO_CHECKPOINT, *reasons.UNSUPPORTED, "unsupported:warp", "warp"]
    rows = [
        seeded_store.request_row(
            engine,
            f"chatcmpl-{code}",
            10**18,
            num_prompt_tokens=900,
            num_cached_tokens=0,
            num_output_tokens=90,
            hit_limited_by="attention",
            no_checkpoint_reason=code,
        )
        for code in codes
    ]
    add(empty_url, requests=rows)
    at = open_page(empty_url, "request")
    for code in codes:
        at.query_params["request"] = f"chatcmpl-{code}"
        at.run()
        assert not at.exception
        said = page_content.texts(at)
        assert reasons.no_checkpoint(code).sentence in said
        assert reasons.no_checkpoint(code).advice in said
        assert "None of its 900 prompt tokens were reused" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "open", "finish_reason": None}, reasons.STILL_RUNNING.sentence),
        ({"status": "engine_lost"}, reasons.ENGINE_LOST.sentence),
        ({"incomplete": True}, reasons.EVENTS_MISSING.sentence),
        ({}, "no reason"),
        ({"num_cached_tokens": None}, "never admitted"),
        ({"status": "open", "num_cached_tokens": None}, "Waiting to be admitted"),
        ({"num_external_tokens": 64}, "A KV connector brought 64 more"),
        (
            {"retained_boundary": 960, "retained_kind": "exact_tail"},
            "at token 960 (exact tail) was published",
        ),
        ({"num_preemptions": 2}, "preempted 2 times"),
    ],
)
def test_states_of_a_request(open_page, empty_url, engine, changes, words):
    row = seeded_store.request_row(
        engine, "chatcmpl-1", 10**18, num_prompt_tokens=900, num_cached_tokens=0
    )
    add(empty_url, requests=[row | changes])
    at = open_page(empty_url, "request", request="chatcmpl-1")
    assert not at.exception
    assert words in page_content.texts(at)


def test_every_stage_of_a_checkpoint(open_page, empty_url, engine):
    row = seeded_store.request_row(
        engine,
        "chatcmpl-1",
        10**18,
        num_prompt_tokens=900,
        num_cached_tokens=0,
        num_output_tokens=9000,
        arrival_ns=10**18 - 10**10,
    )
    rows = seeded_store.Rows()
    more = {
        "discarded": {"discard_reason": "memory_pressure", "discarded_ns": 10**18},
        "evicted": {"eviction_reason": "lru", "evicted_ns": 10**18 + 5},
    }
    for index, stage in enumerate(reasons.STAGE):
        seeded_store.checkpoint_row(
            rows,
            row,
            1056 * (index + 1),
            stage=stage,
            pinned_ns=10**18 - 10**9,
            **more.get(stage, {}),
        )
    add(empty_url, requests=[row], checkpoints=rows.checkpoints)
    at = open_page(empty_url, "request", request="chatcmpl-1")
    assert not at.exception
    shown = page_content.table(at, "Checkpoints")
    by_stage = {r["cells"][2]["text"]: r for r in shown}
    assert set(by_stage) == set(reasons.STAGE)
    assert by_stage["discarded"]["cells"][3]["text"] == "memory pressure"
    evicted = {i["label"]: i["text"] for i in by_stage["evicted"]["detail"]["items"]}
    assert "Nobody had used it." in evicted["evicted because"]
    shapes = [r["cells"][2]["shape"] for r in shown]
    assert len(set(shapes)) == len(shapes)


def test_an_unknown_request_says_why_that_may_be(open_page, seeded_url):
    at = open_page(seeded_url, "request", request="chatcmpl-nobody")
    assert "No such request in this store" in page_content.texts(at)
    assert page_content.table(at, "The newest requests")
    at.text_input[0].set_value("chatcmpl-arm-on-turn-1")
    at.button[0].click().run()
    assert page_content.figures(at)["Reused"] == "3,168"
    assert "chatcmpl-arm-on-turn-1" in at.query_params["request"]


def test_an_id_that_two_engines_served(open_page, empty_url):
    rows, engines = [], []
    for number, label in ((1, "arm-off"), (2, "arm-on")):
        engine = seeded_store.engine_row(number, label, 10**18)
        engines.append(engine)
        rows.append(
            seeded_store.request_row(
                engine,
                "chatcmpl-same",
                10**18 + number,
                num_prompt_tokens=100,
                num_cached_tokens=10 * number,
            )
        )
    add(empty_url, engines=engines, requests=rows)
    at = open_page(empty_url, "request", request="chatcmpl-same")
    assert "2 requests have this id" in page_content.texts(at)
    assert page_content.figures(at)["Reused"] == "20"  # the newest
    at = open_page(
        empty_url,
        "request",
        request="chatcmpl-same",
        engine=engines[0]["engine_id"],
    )
    assert page_content.figures(at)["Reused"] == "10"


def test_a_completion_is_found_by_the_id_that_its_client_was_told(open_page, empty_url):
    engine = seeded_store.engine_row(1, "prod", 10**18)
    row = seeded_store.request_row(
        engine, "cmpl-a1-0", 10**18, num_prompt_tokens=100, num_cached_tokens=10
    )
    add(empty_url, engines=[engine], requests=[row])
    at = open_page(empty_url, "request", request="cmpl-a1")
    assert page_content.figures(at)["Reused"] == "10"


def test_jaeger(open_page, seeded_url, monkeypatch):
    wanted = {"request": "chatcmpl-arm-on-turn-1"}
    at = open_page(seeded_url, "request", **wanted)
    (button,) = [b for b in at.button if b.label == "Open in Jaeger"]
    assert button.disabled
    assert "VLLM_FORK_JAEGER_URL" in button.help
    monkeypatch.setenv("VLLM_FORK_JAEGER_URL", "http://127.0.0.1:16686/")
    at = open_page(seeded_url, "request", **wanted)
    (link,) = at.get("link_button")
    assert link.proto.url.startswith("http://127.0.0.1:16686/trace/")
    assert len(link.proto.url.rsplit("/", 1)[1]) == 32


def test_a_jaeger_url_that_would_run_is_refused(open_page, seeded_url, monkeypatch):
    monkeypatch.setenv("VLLM_FORK_JAEGER_URL", "javascript:alert(1)")
    at = open_page(seeded_url, "request", request="chatcmpl-arm-on-turn-1")
    assert not at.get("link_button")
    assert "must begin with http://" in page_content.texts(at)


@pytest.fixture(scope="module")
def hostile_url(tmp_path_factory) -> str:
    """A store whose ids, labels, models and reasons are all hostile."""
    url = f"sqlite:///{tmp_path_factory.mktemp('hostile') / 'hostile.db'}"
    engines, streams, rows = [], [], seeded_store.Rows()
    for number, text in enumerate(HOSTILE):
        engine = seeded_store.engine_row(number, text, 10**18, model_name=text)
        engines.append(engine)
        streams.append(
            seeded_store.stream_row(engine, 10**18, endpoint=text[:400], state="gapped")
        )
        rows.requests.append(
            seeded_store.request_row(
                engine,
                text[:400],
                10**18,
                session_id=text[:256],
                num_prompt_tokens=900,
                num_cached_tokens=0,
                num_output_tokens=9,
                no_checkpoint_reason=text[:64],
                finish_reason=text[:32],
                stop_reason=text,
            )
        )
    seeded_store.write(url, engines, rows, streams, [])
    return url


def assert_no_markup(at) -> None:
    """No text of the page holds an unescaped piece of a hostile one."""
    for element in (*at.markdown, *at.caption, *at.error, *at.warning, *at.info):
        plain = str(element.value).replace("\\\\", "")
        for active in ("<script", "<img", "![x", "[click", "$$x", ":red[", "`code"):
            position = plain.find(active)
            assert position < 0 or plain[position - 1] == "\\", plain
    for data in page_content.tables(at).values():
        for row in data["rows"]:
            for cell in row["cells"]:
                shown = f"{cell.get('text', '')}{cell.get('link', {}).get('text', '')}"
                assert not set(shown) & set("\u202e\n\t\x07"), shown
                assert len(shown) <= 301


@pytest.mark.parametrize(
    "page", ["overview", "requests", "conversations", "compare", "health"]
)
def test_hostile_texts_are_text(open_page, hostile_url, page):
    at = open_page(hostile_url, page)
    assert not at.exception
    assert_no_markup(at)


@pytest.mark.parametrize(
    ("page", "parameter", "length", "figure"),
    [
        ("request", "request", 400, ("Prompt", "900")),
        ("conversations", "conversation", 256, ("Turns", "1")),
    ],
)
def test_a_hostile_id_deep_links(
    open_page, hostile_url, page, parameter, length, figure
):
    """The page of a request, and of its conversation, whatever it is called."""
    at = open_page(hostile_url, page)
    for text in HOSTILE:
        at.query_params[parameter] = text[:length]
        at.run()
        assert not at.exception
        assert figure in page_content.figures(at).items(), text
        assert_no_markup(at)


def test_no_html_is_allowed_with_data():
    """Nothing in the dashboard turns text into markup."""
    for path in (Path(__file__).parents[2] / "ui").rglob("*"):
        if path.suffix in (".py", ".js"):
            source = path.read_text()
            for word in (
                "unsafe_allow",
                "innerHTML",
                "insertAdjacentHTML",
                "outerHTML",
            ):
                assert word not in source, path


# -- conversations, comparison, health ------------------------------------


def test_a_conversation_turn_by_turn(open_page, seeded_url):
    at = open_page(seeded_url, "conversations", conversation="reference-dialog-arm-on")
    assert not at.exception
    figures = page_content.figures(at)
    assert figures["Turns"] == "5"
    assert figures["Hit rate"] == "94.7%"
    assert figures["Computed again"] == "1,559"
    turns = page_content.table(at, "Turns")
    assert [row["name"] for row in turns] == [
        f"chatcmpl-arm-on-turn-{i}" for i in range(5)
    ]


def test_one_session_id_on_two_labels_is_chosen_between(open_page, empty_url):
    engines = [seeded_store.engine_row(i, f"arm-{i}", 10**18) for i in (1, 2)]
    rows = [
        seeded_store.request_row(
            engine,
            f"chatcmpl-{i}-{turn}",
            10**18 + turn,
            session_id="same",
            num_prompt_tokens=100,
            num_cached_tokens=0,
        )
        for i, engine in enumerate(engines)
        for turn in range(i + 1)
    ]
    add(empty_url, engines=engines, requests=rows)
    at = open_page(empty_url, "conversations", conversation="same")
    assert page_content.figures(at)["Turns"] == "1"
    at = open_page(empty_url, "conversations", conversation="same", of="arm-2")
    assert page_content.figures(at)["Turns"] == "2"


def test_the_comparison_prints_the_reference_s_table(open_page, seeded_url):
    """Off against on is what it opens with."""
    at = open_page(seeded_url, "compare")
    assert not at.exception
    text = at.code[0].value
    assert "Total\t23056 / 36254 / 21040\t32736 / 34550 / 14894" in text
    assert "Hit rate\t63.6%\t94.7%" in text
    assert page_content.figures(at)["Hit rate B"] == "94.7%"


def test_any_two_arms_by_engine_and_time(open_page, seeded_url):
    at = open_page(seeded_url, "compare")
    options = at.selectbox(key="a").options
    one_start = next(o for o in options if o.startswith("arm-on ·"))
    at.selectbox(key="a").set_value(
        f"engine:{seeded_store.engine_row(2, '', 0)['engine_id']}"
    )
    at.selectbox(key="b").set_value("label:prod-1").run()
    assert not at.exception
    assert one_start.split(" · ")[0] in at.code[0].value
    assert "32736 / 34550 / 14894" in at.code[0].value
    assert "Sums over" in page_content.texts(at)


def test_a_dialog_without_session_ids_is_compared_by_arrival(open_page, empty_url):
    """Retention off: nothing ties the turns together but their order."""
    engines = [seeded_store.engine_row(i, f"arm-{i}", 10**18) for i in (1, 2)]
    engines[0]["retention"] = "off"
    rows = [
        seeded_store.request_row(
            engine,
            f"chatcmpl-{engine['label']}-{turn}",
            10**18 + turn,
            arrival_ns=10**18 + turn,
            conversation_id=f"c-{turn}" if engine is engines[0] else "c",
            num_prompt_tokens=100 * (turn + 1),
            num_cached_tokens=10 * turn,
            num_output_tokens=7,
        )
        for engine in engines
        for turn in range(3)
    ]
    add(empty_url, engines=engines, requests=rows)
    at = open_page(empty_url, "compare")
    assert at.code[0].value.splitlines()[1:4] == [
        "0\t0 / 100 / 7\t0 / 100 / 7",
        "1\t10 / 200 / 7\t10 / 200 / 7",
        "2\t20 / 300 / 7\t20 / 300 / 7",
    ]
    at.get("button_group")[0].set_value("of each conversation").run()
    assert at.code[0].value.splitlines()[1].startswith("0\t30 / 600 / 21\t")


def test_an_arm_without_requests_says_so(open_page, empty_url, engine):
    at = open_page(empty_url, "compare")
    assert not at.exception
    assert "An arm has no requests" in page_content.texts(at)


def test_health_shows_each_state_and_gap(open_page, seeded_url):
    at = open_page(seeded_url, "health")
    states = {r["name"]: r["cells"][1]["text"] for r in page_content.table(at, "Event")}
    assert states["prod-2"] == "gapped"
    assert states["prod-3"] == "disconnected"
    gaps = page_content.table(at, "Gaps")
    assert {r["cells"][2]["text"] for r in gaps} == {"open", "lost", "recovered"}
    assert "[48,212, 48,260)" in [r["cells"][0]["text"] for r in gaps]
    engines = page_content.table(at, "Engines")
    off = next(r for r in engines if r["name"] == "arm-off")
    assert "RETAIN_DECODE_CHECKPOINTS is 0" in off["cells"][2]["help"]
    assert page_content.figures(at)["Lost"] == "37"


# -- settings and pause ---------------------------------------------------


def test_paused_counts_what_changed_since(open_page, tmp_path):
    url = f"sqlite:///{tmp_path / 'pause.db'}"
    seeded_store.seed(url, num_requests=20)
    at = open_page(url, "requests")
    assert "newest event" in page_content.texts(at)
    at.toggle(key="live").set_value(False).run()
    assert "Paused at" in page_content.texts(at)
    engine = seeded_store.engine_row(3, "prod-1", 0)
    add(url, requests=[seeded_store.request_row(engine, "chatcmpl-new", 2 * 10**18)])
    at.run()
    assert "1 changed since" in page_content.texts(at)


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ([], {}, ("sqlite:///vllm-fork.db", None)),
        ([], {"VLLM_FORK_STORE_URL": "sqlite:///a.db"}, ("sqlite:///a.db", None)),
        (
            ["--store", "sqlite:///b.db", "--jaeger", "http://j/"],
            {"VLLM_FORK_STORE_URL": "sqlite:///a.db"},
            ("sqlite:///b.db", "http://j"),
        ),
    ],
)
def test_settings(arguments, environ, expected):
    loaded = settings.load(arguments, environ)
    assert (loaded.store_url, loaded.jaeger_url) == expected
    assert not loaded.problem


@pytest.mark.parametrize("arguments", [["--stor"], ["--store"], ["x"]])
def test_a_wrong_option_is_said(arguments):
    assert settings.load(arguments, {}).problem
