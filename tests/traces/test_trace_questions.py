"""Each of the ten questions of docs/traces.md, asked of a store and of a collector
to which the same story was told."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from event_consumer import names
from event_consumer.cli import app
from event_consumer.otlp import OtlpSettings
from event_consumer.otlp_receiver import OtlpReceiver, ReceivedSpan
from event_consumer.store import ChangeSet, Store
from event_consumer.tracing import RequestTracer

SECOND = 1_000_000_000

DOCUMENT = Path(__file__).parents[2] / "docs" / "traces.md"

# What each documented command finds in the story, in order.
ANSWERS: dict[str, Any] = {
    "--min-reprefilled 4096 --order reprefilled": ["43", "51"],
    "--evicted-before-use": ["50"],
    "--request chatcmpl-42": ["42"],
    "--session support-7 --order oldest": ["40", "41", "42", "43", "70", "71"],
    "--left-none --by no_checkpoint_reason": {
        "disabled": 2,
        "aborted": 1,
        "below_block": 1,
        "length": 1,
        "memory_pressure": 1,
    },
    "--left-none --reason below_block": ["60"],
    "--reason memory_pressure": ["61"],
    "--limited-by recurrent_state --min-recomputed 1000": ["71", "43"],
    "--resumed-from chatcmpl-41": ["42"],
    "--source exact_tail --min-depth 2000 --order depth": ["42"],
    "--label arm-on --by source_kind": {
        "none": 7,
        "decode_block": 1,
        "exact_tail": 1,
        "shared_prefix": 1,
    },
    "--status engine_lost": ["62"],
    "--incomplete": ["63"],
}

# What each documented TraceQL query and set of Jaeger tags finds.
SPANS_FOUND: dict[str, list[str]] = {
    '{ name = "kv_cache.request" && span.vllm.prefix_cache.prefilled_tokens > 4096 && '
    'span.vllm.prefix_cache.hit_limited_by != "prompt_end" }': ["43", "51"],
    '{ span.gen_ai.request.id = "chatcmpl-42" }': ["42", "42"],
    '{ name = "kv_cache.request" && span.gen_ai.conversation.id = "support-7" }': [
        "40",
        "41",
        "42",
        "43",
        "70",
        "71",
    ],
    '{ name = "kv_cache.request" && '
    'span.vllm.checkpoint.none_reason = "below_block" }': ["60"],
    '{ name = "kv_cache.checkpoint" && '
    'span.vllm.checkpoint.reason = "memory_pressure" }': ["61"],
    "{ span.vllm.prefix_cache.recomputed_tokens >= 1000 && "
    'span.vllm.prefix_cache.hit_limited_by = "recurrent_state" }': ["43", "71"],
    '{ span.vllm.prefix_cache.source.request.id = "chatcmpl-41" }': ["42"],
    '{ span.vllm.prefix_cache.source.kind = "exact_tail" && '
    "span.vllm.prefix_cache.reuse_depth >= 2000 }": ["42"],
    '{ name = "kv_cache.request" && span.error.type = "engine_lost" }': ["62"],
    "vllm.prefix_cache.hit_limited_by=recurrent_state": ["43", "71"],
    "gen_ai.request.id=chatcmpl-42": ["42", "42"],
    "gen_ai.conversation.id=support-7": [
        *["40", "40", "41", "41", "41", "42", "42"],
        *["43", "43", "70", "71"],
    ],
    "vllm.checkpoint.none_reason=below_block": ["60"],
    "vllm.checkpoint.reason=memory_pressure": ["61"],
    "vllm.prefix_cache.source.request.id=chatcmpl-41": ["42"],
    "vllm.prefix_cache.source.kind=exact_tail": ["42"],
    "error.type=engine_lost": ["62"],
}

runner = CliRunner()


def blocks(language: str) -> list[str]:
    """The lines of the document's fenced blocks of one language."""
    questions = (
        DOCUMENT.read_text().split("## Ten questions")[1].split("## Attributes")[0]
    )
    found = re.findall(rf"^```{language}\n(.*?)^```", questions, re.M | re.S)
    return [line for block in found for line in block.splitlines()]


def commands() -> list[str]:
    prefix = "event-consumer traces "
    lines = blocks("sh")
    assert all(line.startswith(prefix) for line in lines)
    return [line.removeprefix(prefix) for line in lines]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def store_url(request, story: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url")
    else:
        url = f"sqlite:///{tmp_path_factory.mktemp('store')}/story.db"
    with Store(url) as store:
        store.commit(story.changes)
    return url


@pytest.fixture(scope="module")
def spans(story: Any) -> Iterator[list[ReceivedSpan]]:
    with OtlpReceiver() as receiver:
        tracer = RequestTracer(OtlpSettings(endpoint=receiver.grpc_url))
        for closed in story.closed:
            tracer.request_closed(*closed)
        assert tracer.flush(10)
        tracer.shutdown()
        yield receiver.spans()


def stored(folder: Path, **records: Any) -> str:
    """The URL of a new store that holds ``records``, as :meth:`ChangeSet.of` takes
    them."""
    url = f"sqlite:///{folder}/records.db"
    with Store(url) as store:
        store.commit(ChangeSet.of(**records))
    return url


def ask(store_url: str, options: str) -> dict[str, Any]:
    arguments = ["traces", *shlex.split(options), "--store", store_url, "--json"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def name_of(request: dict[str, Any]) -> str:
    return request["external_request_id"].removeprefix("chatcmpl-")


def test_there_are_ten_questions_and_each_has_a_command():
    questions = (
        DOCUMENT.read_text().split("## Ten questions")[1].split("## Attributes")[0]
    )
    sections = re.split(r"^### \d+\. ", questions, flags=re.M)[1:]
    assert len(sections) == 10
    for section in sections:
        assert "```sh\nevent-consumer traces " in section
        assert "```traceql\n" in section or "```logql\n" in section


def test_every_documented_command_is_tested():
    assert sorted(commands()) == sorted(ANSWERS)


@pytest.mark.parametrize("options", commands())
def test_the_command_answers(store_url, options):
    answer = ask(store_url, options)
    expected = ANSWERS[options]
    if isinstance(expected, dict):
        column = options.split()[-1]
        counts = {group[column]: group["num_requests"] for group in answer["groups"]}
        assert counts == expected
    else:
        assert [name_of(trace) for trace in answer["traces"]] == expected
        assert answer["num_matched"] == len(expected)


@pytest.mark.parametrize("options", commands())
def test_the_command_answers_in_words_too(store_url, options):
    result = runner.invoke(app, ["traces", *shlex.split(options), "--store", store_url])
    assert result.exit_code == 0, result.output
    expected = ANSWERS[options]
    if isinstance(expected, dict):
        told = [line.split() for line in result.stdout.splitlines()]
        assert {value: int(count) for count, value in told} == expected
    else:
        for name in expected:
            assert f"chatcmpl-{name}" in result.stdout
        assert f"{len(expected)} request" in result.stdout.splitlines()[-1]


def test_every_documented_span_query_is_tested():
    assert sorted({*blocks("traceql"), *blocks("jaeger-tags")}) == sorted(SPANS_FOUND)


@pytest.mark.parametrize("query", [*SPANS_FOUND])
def test_the_query_finds_the_spans(spans, query):
    matches = traceql(query) if query.startswith("{") else jaeger_tags(query)
    found = [span for span in spans if matches(span)]
    assert sorted(name_of_span(span) for span in found) == SPANS_FOUND[query]


def name_of_span(span: ReceivedSpan) -> str:
    return span.attributes["gen_ai.request.id"].removeprefix("chatcmpl-")


def traceql(query: str):
    """The part of TraceQL that the document uses: comparisons joined by ``&&``."""
    compare = {
        "=": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
    }
    inner = re.fullmatch(r"\{ (.*) \}", query)
    assert inner is not None
    conditions = []
    for condition in inner[1].split(" && "):
        left, operator, right = condition.split(" ", 2)
        conditions.append((left, compare[operator], json.loads(right)))

    def value(span: ReceivedSpan, left: str) -> Any:
        if left == "name":
            return span.name
        assert left.startswith("span.")
        return span.attributes.get(left.removeprefix("span."))

    def matches(span: ReceivedSpan) -> bool:
        found = [(value(span, left), holds, right) for left, holds, right in conditions]
        return all(v is not None and holds(v, right) for v, holds, right in found)

    return matches


def jaeger_tags(query: str):
    """Jaeger's Tags field: ``key=value`` pairs, all of them, as text."""
    pairs = [pair.split("=", 1) for pair in shlex.split(query)]
    return lambda span: all(str(span.attributes.get(k)) == v for k, v in pairs)


def test_the_log_query_names_what_a_late_eviction_tells(story):
    (query,) = blocks("logql")
    assert f'event_name="{names.EVICTED}"' in query
    assert names.NUM_HITS.replace(".", "_") in query
    assert f'service_name="{names.SERVICE_NAME}"' in query


@pytest.mark.parametrize(
    ("evicted_s", "attention_evicted_s", "why"),
    [
        (
            None,
            None,
            "the turn before's checkpoint at 7500 (exact_tail) was not continued: "
            "this prompt renders what came before it otherwise",
        ),
        (
            None,
            10,
            "attention blocks under the turn before's checkpoint at 7500 were evicted "
            "before this turn came",
        ),
        (
            10,
            None,
            "the turn before's checkpoint at 7500 was evicted (lru) before this turn "
            "came",
        ),
        (
            99,
            99,
            "the turn before's checkpoint at 7500 (exact_tail) was not continued: "
            "this prompt renders what came before it otherwise",
        ),
    ],
)
def test_why_a_turn_resumed_at_the_shallower_of_two(
    tmp_path, make_request, make_checkpoint, evicted_s, attention_evicted_s, why
):
    first = make_request("first", retained_boundary=7500)
    evicted = {"evicted_ns": evicted_s * SECOND} if evicted_s else {}
    if attention_evicted_s:
        evicted["attention_evicted_ns"] = attention_evicted_s * SECOND
    checkpoints = [
        make_checkpoint(first, 1, boundary=7392),
        make_checkpoint(
            first,
            2,
            boundary=7500,
            boundary_kind="exact_tail",
            eviction_reason="lru" if evicted_s else None,
            **evicted,
        ),
    ]
    second = make_request(
        "second",
        arrival_ns=20 * SECOND,
        admitted_ns=21 * SECOND,
        num_prompt_tokens=7800,
        num_cached_tokens=7392,
        source_request_id=first.request_id,
        source_checkpoint_id=1,
        source_boundary=7392,
    )
    url = stored(tmp_path, requests=[first, second], checkpoints=checkpoints)
    (trace,) = ask(url, "--request second")["traces"]
    assert trace["why"] == why


@pytest.mark.parametrize("source_kind", ["prompt_replay", "shared_prefix", "none"])
def test_an_answer_that_comes_back_changed_is_told_as_such(
    tmp_path, make_request, make_checkpoint, source_kind
):
    """It differs at token 2219, below both checkpoints: what was reused is stock
    vLLM's, and nothing says how much of the rest is new."""
    first = make_request(
        "first", num_prompt_tokens=2200, num_output_tokens=460, retained_boundary=2659
    )
    checkpoints = [
        make_checkpoint(first, 1, boundary=2304),
        make_checkpoint(first, 2, boundary=2659, boundary_kind="exact_tail"),
    ]
    second = make_request(
        "second",
        arrival_ns=20 * SECOND,
        admitted_ns=21 * SECOND,
        num_prompt_tokens=2702,
        num_cached_tokens=2144,
        hit_limited_by="recurrent_state",
        source_kind=source_kind,
        source_request_id=first.request_id if source_kind == "prompt_replay" else None,
        source_boundary=2144 if source_kind == "prompt_replay" else None,
    )
    url = stored(tmp_path, requests=[first, second], checkpoints=checkpoints)
    arguments = ["traces", "--request", "second", "--store", url]
    told = runner.invoke(app, arguments).stdout.splitlines()
    assert told[1].endswith("prefilled 558, up to 515 of them again")
    assert told[2] == (
        "    why: the turn before's checkpoint at 2304 (decode_block) was not "
        "continued: this prompt renders what came before it otherwise"
    )
    (trace,) = ask(url, "--request second")["traces"]
    assert trace["reprefilled_is_upper_bound"] is True


@pytest.mark.parametrize("reason", [None, "aborted"])
def test_the_same_prompt_sent_again_blames_no_checkpoint(
    tmp_path, make_request, make_checkpoint, reason
):
    """Those of the answer lie beyond its end."""
    first = make_request(
        "first",
        num_prompt_tokens=2200,
        num_output_tokens=460,
        no_checkpoint_reason=reason,
    )
    checkpoints = [] if reason else [make_checkpoint(first, 1, boundary=2304)]
    second = make_request(
        "second",
        arrival_ns=20 * SECOND,
        admitted_ns=21 * SECOND,
        num_prompt_tokens=2200,
        num_cached_tokens=2192,
        hit_limited_by="prompt_end",
        source_kind="prompt_replay",
        source_request_id=first.request_id,
        source_boundary=2192,
    )
    url = stored(tmp_path, requests=[first, second], checkpoints=checkpoints)
    (trace,) = ask(url, "--request second")["traces"]
    assert trace["num_reprefilled_tokens"] == 8
    assert trace["reprefilled_is_upper_bound"] is False
    assert trace["why"] == "the last tokens of a prompt are never reused"


@pytest.mark.parametrize(
    ("request_name", "why"),
    [
        ("43", "the turn before left no checkpoint: length"),
        (
            "51",
            "the turn before's checkpoint at 6799 was evicted (lru) "
            "before this turn came",
        ),
        (
            "41",
            "the turn before left its checkpoint at 4224; "
            "what came after it was not kept",
        ),
        ("71", "the turn before left no checkpoint: disabled"),
        ("42", None),
        ("40", None),
    ],
)
def test_why_a_turn_computed_again_what_was_known(store_url, request_name, why):
    (trace,) = ask(store_url, f"--request chatcmpl-{request_name}")["traces"]
    assert trace["why"] == why
    assert bool(trace["num_reprefilled_tokens"]) == (why is not None)


def test_reprefilled_is_what_the_turn_before_had_computed(store_url):
    """Turn before: 8200 + 2700 tokens, the last of them sampled but never run; this
    prompt has 11000, of which 1056 were cached."""
    (trace,) = ask(store_url, "--request chatcmpl-43")["traces"]
    assert trace["num_prefilled_tokens"] == 11000 - 1056
    assert trace["num_reprefilled_tokens"] == 8200 + 2700 - 1 - 1056
    assert trace["num_recomputed_tokens"] == 8448 - 1056
    assert trace["previous_request_id"] == "chatcmpl-42-0badf00d"


def test_the_turn_before_is_of_the_same_arm(store_url):
    (trace,) = ask(store_url, "--request chatcmpl-71")["traces"]
    assert trace["previous_request_id"] == "chatcmpl-70-0badf00d"
    (trace,) = ask(store_url, "--request chatcmpl-70")["traces"]
    assert trace["previous_request_id"] is None


def test_a_trace_has_its_spans_and_its_link(store_url, spans):
    (trace,) = ask(store_url, "--request chatcmpl-42")["traces"]
    (exported,) = [
        span
        for span in spans
        if span.name == "kv_cache.request" and name_of_span(span) == "42"
    ]
    assert (trace["trace_id"], trace["span_id"]) == (
        exported.trace_id,
        exported.span_id,
    )
    (link,) = trace["links"]
    (exported_link,) = exported.links
    assert link["trace_id"] == exported_link.trace_id
    assert link["span_id"] == exported_link.span_id
    children = {
        span.span_id for span in spans if span.parent_span_id == exported.span_id
    }
    assert {checkpoint["span_id"] for checkpoint in trace["checkpoints"]} == children
    by_trace = ask(store_url, f"--request {exported.trace_id}")["traces"]
    assert by_trace == [trace]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--min-preemptions 1", ["61"]),
        ("--max-depth 0 --min-reprefilled 1", ["51"]),
        ("--stage evicted --max-hits 0", ["50"]),
        ("--kind exact_tail --stage published", ["43", "41"]),
        ("--model tiny-hybrid --label arm-off", ["71", "70"]),
        ("--engine bbbbbbbb-0000-4000-8000-000000000002 --order oldest", ["70", "71"]),
        ("--min-prefilled 9000", ["43"]),
        ("--model other", []),
        ("--until 1h", []),
        ("--since 1h --stage promoted", ["62"]),
        ("--limit 2 --order prefilled", ["43", "51"]),
    ],
)
def test_filters_and_orders(store_url, options, expected):
    assert [name_of(t) for t in ask(store_url, options)["traces"]] == expected


def test_a_trace_is_told_in_words(store_url):
    arguments = ["traces", "--request", "chatcmpl-41", "--store", store_url]
    told = runner.invoke(app, arguments).stdout.splitlines()
    assert told[0].endswith("Z  chatcmpl-41 [arm-on]")
    assert told[1:6] == [
        "    reused 4224 of 5100 prompt tokens (from the decode_block of chatcmpl-40), "
        "prefilled 876, 775 of them again",
        "    why: the turn before left its checkpoint at 4224; what came after it was "
        "not kept",
        "    ended by stop, left a checkpoint at 8099 (exact_tail)",
        "    checkpoint 2 at 7392 (decode_block): discarded (superseded)",
        "    checkpoint 3 at 8099 (exact_tail): published, used 1 time",
    ]
    assert told[6] == "    conversation support-7"


def test_a_limit_says_how_many_there_are(store_url):
    result = runner.invoke(app, ["traces", "--limit", "2", "--store", store_url])
    assert result.stdout.splitlines()[-1] == "12 requests found. 2 are shown (--limit)."
    assert ask(store_url, "--limit 2")["num_matched"] == 12


def test_ids_cannot_move_the_cursor(tmp_path, make_request):
    url = stored(tmp_path, requests=[make_request("\x1b[2Jevil\r\n")])
    result = runner.invoke(app, ["traces", "--store", url])
    assert "evil" in result.stdout
    assert "\x1b" not in result.stdout
    assert "\r" not in result.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--stage publishd", "did you mean published?"),
        ("--reason memory_presure", "did you mean memory_pressure?"),
        ("--source exact-tail", "did you mean exact_tail?"),
        ("--limited-by state", "recurrent_state"),
        ("--order newst", "did you mean newest?"),
        ("--by no_checkpoint", "no_checkpoint_reason"),
        ("--since yesterday", "15m"),
        ("--kind block", "decode_block"),
    ],
)
def test_a_value_that_is_not_known_is_refused_with_the_nearest(
    store_url, options, sentence
):
    result = runner.invoke(app, ["traces", *shlex.split(options), "--store", store_url])
    assert type(result.exception).__name__ == "SettingsError"
    assert sentence in str(result.exception)
    assert result.stdout == ""


def test_an_unsupported_reason_is_open_ended(store_url):
    assert ask(store_url, "--reason unsupported:speculative")["traces"] == []


def test_no_group_says_so(store_url):
    arguments = ["traces", "--model", "other", "--by", "status", "--store", store_url]
    assert runner.invoke(app, arguments).stdout == "No requests found.\n"


def test_help_names_each_reason_once_and_no_number_of_the_database():
    told = runner.invoke(app, ["traces", "--help"]).stdout
    assert told.count("cache_reset") == 1
    assert "9223372036854775807" not in told


def test_a_count_beyond_what_a_store_holds_is_refused(store_url):
    arguments = ["traces", "--min-depth", str(2**63), "--store", store_url]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "more than a store holds" in result.output


def test_a_completion_is_found_by_the_id_that_its_client_was_told(
    tmp_path, make_request
):
    """``cmpl-…``; vLLM calls its prompts ``cmpl-…-0``, ``cmpl-…-1``."""
    first = make_request("cmpl-a1-0")
    second = make_request("cmpl-a1-12")
    resumed = make_request(
        "chatcmpl-7",
        source_request_id=first.request_id,
        source_external_request_id="cmpl-a1-0",
    )
    others = [make_request("cmpl-a1-x"), make_request("cmpl-a12-0")]
    others += [make_request("mine"), make_request("mine-0")]
    url = stored(tmp_path, requests=[first, second, resumed, *others])

    def found(options: str) -> set[str]:
        return {t["external_request_id"] for t in ask(url, options)["traces"]}

    assert found("--request cmpl-a1") == {"cmpl-a1-0", "cmpl-a1-12"}
    assert found("--request cmpl-a1-0") == {"cmpl-a1-0"}
    assert found("--resumed-from cmpl-a1") == {"chatcmpl-7"}
    assert found("--request mine") == {"mine"}
