"""The ``event-consumer`` command: the service as it is run, and its queries."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from event_consumer import tables
from event_consumer.cli import app, main
from event_consumer.records import (
    CheckpointRecord,
    EngineRecord,
    GapRecord,
    RequestRecord,
    StreamRecord,
)
from event_consumer.store import ChangeSet, Store
from vllm_fork.events import EngineStarted, EngineStopped

STARTED = EngineStarted(
    time_unix_ns=1, monotonic_ns=1, vllm_version="0", fork_version="0", retention="on"
)


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "event_consumer.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def answer(*arguments: str) -> dict:
    result = ask(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


# -- the service -------------------------------------------------------------


def test_where_the_http_port_is_taken_no_store_is_made(tmp_path):
    store = tmp_path / "store.db"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        endpoint = ("--endpoint", f"ipc://{tmp_path}/pub", "--replay", "none")
        told = ask("run", "--store", f"sqlite:///{store}", "--http", address, *endpoint)
    assert told.returncode == 1
    assert f"cannot listen on {address}" in told.stderr
    assert not store.exists()


def write_config(path, *engines):
    tables = [
        f'[[endpoints]]\nendpoint = "{e.endpoint}"\nreplay = "{e.replay}"\n'
        for e in engines
    ]
    path.write_text("\n".join(tables))


@pytest.mark.parametrize("how", ["SIGHUP", "file"])
def test_the_list_of_endpoints_is_read_again(
    start_engine, start_consumer, sqlite_url, tmp_path, rows, wait_for, how
):
    """On SIGHUP, or when the file changes; a list that is wrong changes nothing."""
    config = tmp_path / "consumer.toml"
    first, second = start_engine(events=200), start_engine(seed=1, events=200)
    write_config(config, first)
    consumer = start_consumer(
        sqlite_url,
        arguments=("--config", str(config)),
        dns_refresh_s=600,
    )
    wait_for(lambda: has_events(rows, sqlite_url, first))
    config.write_text("endpoints = 5")
    consumer.process.send_signal(signal.SIGHUP)
    wait_for(lambda: consumer.says("The former endpoints stay"))
    write_config(config, second)
    if how == "SIGHUP":
        consumer.process.send_signal(signal.SIGHUP)
    wait_for(lambda: has_events(rows, sqlite_url, second))
    states = {row["endpoint"]: row["state"] for row in rows(sqlite_url, tables.streams)}
    assert states[first.endpoint] == "disconnected"
    assert rows(sqlite_url, tables.engines, engine_id=first.engine_id)[0]["status"] == (
        "lost"
    )
    # It comes back where it was.
    write_config(config, first, second)
    consumer.process.send_signal(signal.SIGHUP)
    wait_for(
        lambda: rows(sqlite_url, tables.streams, endpoint=first.endpoint, state="live")
    )
    (stream,) = rows(sqlite_url, tables.streams, endpoint=first.endpoint)
    assert stream["num_events"] == 200
    of_first = {"engine_id": first.engine_id}
    wait_for(lambda: rows(sqlite_url, tables.engines, status="running", **of_first))
    assert rows(sqlite_url, tables.requests, status="open", **of_first)
    assert not rows(sqlite_url, tables.checkpoints, stage="gone", **of_first)


def has_events(rows, url, engine, count=200):
    found = rows(url, tables.streams, endpoint=engine.endpoint)
    return bool(found) and found[0]["num_events"] >= count


def test_a_name_stands_for_its_addresses(
    start_engine, start_consumer, sqlite_url, tmp_path, rows, wait_for
):
    engine = start_engine(events=200)
    config = tmp_path / "consumer.toml"
    by_name = type(engine)(
        engine.process,
        engine.endpoint.replace("tcp://127.0.0.1", "dns+tcp://localhost"),
        engine.replay.replace("tcp://127.0.0.1", "dns+tcp://localhost"),
        engine.engine_id,
    )
    write_config(config, by_name)
    start_consumer(sqlite_url, arguments=("--config", str(config)))
    wait_for(lambda: has_events(rows, sqlite_url, engine))


def test_an_open_gap_is_told_everywhere(
    raw_publisher, start_consumer, sqlite_url, free_port, rows, wait_for
):
    """While it is open, and as lost afterwards: command, HTTP, metric, store."""
    publisher = raw_publisher
    consumer = start_consumer(
        sqlite_url,
        publisher,
        http=f"127.0.0.1:{free_port}",
        replay_timeout_s=600,
    )
    publisher.greet()
    publisher.send(0, STARTED)
    publisher.send(3)
    wait_for(lambda: rows(sqlite_url, tables.streams, state="gapped"))
    told = ask("health", "--store", sqlite_url, "--json")
    health = json.loads(told.stdout.splitlines()[-1])
    assert told.returncode == 1
    assert (health["status"], health["healthy"]) == ("gapped", False)
    assert [(g["first_seq"], g["end_seq"]) for g in health["gaps"]] == [(1, 3)]
    status, body = consumer.get("/healthz")
    assert status == 503
    assert "[1, 3)" in json.loads(body)["problems"][0]
    assert consumer.get("/livez")[0] == 200
    assert consumer.metric("vllm_checkpoint_stream_open_gaps") == 1

    publisher.answer(publisher.asked()[0], {3: publisher.payload()}, 3, 4)
    wait_for(lambda: rows(sqlite_url, tables.streams, applied_seq=3))
    health = answer("health", "--store", sqlite_url)
    assert (health["status"], health["num_lost_batches"]) == ("lossy", 2)
    assert health["gaps"][0]["status"] == "lost"
    assert consumer.get("/healthz")[0] == 200
    assert consumer.metric("vllm_checkpoint_stream_lost_total") == 2
    told = ask("health", "--store", sqlite_url)
    assert told.returncode == 0
    assert "lost: batches [1, 3)" in told.stdout
    assert consumer.get("/nowhere")[0] == 404


def test_health_tells_of_frames_that_did_not_decode_and_of_an_engine_that_stopped(
    raw_publisher, start_consumer, sqlite_url, rows, wait_for
):
    publisher = raw_publisher
    start_consumer(sqlite_url, publisher)
    publisher.greet()
    publisher.send(0, STARTED, {"type": "CheckpointTeleported"})
    publisher.send_frames(b"short", b"\xc1 no msgpack")
    wait_for(lambda: rows(sqlite_url, tables.streams, num_undecodable=1))
    told = ask("health", "--store", sqlite_url).stdout
    assert f"{publisher.endpoint}: 1 frames or events did not decode" in told
    assert f"{publisher.endpoint}: 1 events are of types" in told
    assert "stopped" not in told
    publisher.send(1, EngineStopped(time_unix_ns=2, monotonic_ns=2))
    wait_for(lambda: rows(sqlite_url, tables.engines, status="stopped"))
    told = ask("health", "--store", sqlite_url)
    assert told.returncode == 0
    assert f"{publisher.endpoint}: its engine has stopped, in order." in told.stdout
    header, row = told.stdout.splitlines()[-2:]
    cells = dict(zip(header.split(), row.split(), strict=True))
    assert (cells["engine"], cells["undecodable"]) == ("stopped", "1")


def test_consumers_share_the_endpoints_of_one_postgresql(
    start_engine, start_consumer, postgresql, rows, wait_for
):
    url = postgresql("shared")
    engines = [start_engine(seed=seed, events=3_000) for seed in range(2)]
    for engine in engines:
        start_consumer(url, engine)
    for engine in engines:
        wait_for(lambda: has_events(rows, url, engine, 3_000))  # noqa: B023
    of_engine = [
        {r["request_id"] for r in rows(url, tables.requests, engine_id=e.engine_id)}
        for e in engines
    ]
    assert all(len(names) > 300 for names in of_engine)
    assert len(rows(url, tables.requests)) == sum(map(len, of_engine))
    assert len(rows(url, tables.engines)) == 2


def test_the_same_stream_is_the_same_in_both_stores(
    start_engine, start_consumer, postgresql, sqlite_url, rows, records, wait_for
):
    engine = start_engine(events=3_000)
    urls = (sqlite_url, postgresql("same"))
    for url in urls:
        start_consumer(url, engine)
    for url in urls:
        wait_for(lambda: has_events(rows, url, engine, 3_000))  # noqa: B023
    assert records(urls[0]) == records(urls[1])


def damaged_store(folder) -> str:
    """A store whose pages make no sense after the first 100 bytes."""
    path = folder / "damaged.db"
    Store(f"sqlite:///{path}").close()
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    return f"sqlite:///{path}"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "--endpoint", "tcp://h:1"], 2, "one --replay for each --endpoint"),
        (
            ["run", "--endpoint", "h:1", "--replay", "none"],
            2,
            "must be tcp://HOST:PORT",
        ),
        (
            ["run", "--endpoint", "tcp://no host:1", "--replay", "none"],
            2,
            "tcp://no host:1 is no address",
        ),
        (["run", "--config", "/no/such.toml"], 2, "cannot be read"),
        (["run", "--config", "WRONG"], 2, "did you mean store?"),
        (["run", "--config", "NOT_TOML"], 2, "is not TOML"),
        (["run", "--store", "x.db"], 1, "write sqlite:///x.db"),
        (["run", "--store", ""], 1, "write sqlite:///PATH"),
        (
            ["run", "--store", "MISSPELT"],
            1,
            "'tiemout', which is not known: write time",
        ),
        (["requests", "--store", "MISSPELT"], 1, "which is not known: write timeout"),
        (["run", "--store", "NO_FOLDER"], 1, "make it with `mkdir -p /no/such/folder`"),
        (["run", "--store", "FOLDER"], 1, "is a folder; name a file in it"),
        (["run", "--store", "NOTES"], 1, "is not an SQLite database; name another"),
        (["run", "--store", "DAMAGED"], 1, "move the file away"),
        (["run", "--store", "BAD_PORT"], 1, "is not a store URL"),
        (["health", "--store", "NO_FOLDER"], 1, "make it with `mkdir -p"),
        (["health", "--store", "FOLDER"], 1, "is a folder; name a file in it"),
        (["health", "--store", "NOTES"], 1, "is not an SQLite database"),
        (["health", "--store", "DAMAGED"], 1, "move the file away"),
        (["health", "--store", "UNDER_A_FILE"], 1, "is a file, not a folder"),
        (["health", "--store", "NONE"], 1, "There is no store"),
        (["health", "--store"], 2, "requires an argument"),
        (["health", "more"], 2, "unexpected extra argument"),
        (["traces", "--store", "NO_FOLDER"], 1, "make it with `mkdir -p"),
        (["traces", "--store", "FOLDER"], 1, "is a folder; name a file in it"),
        (["traces", "--store", "NOTES"], 1, "is not an SQLite database"),
        (["traces", "--store", "DAMAGED"], 1, "move the file away"),
        (["traces", "--store", "BAD_PORT"], 1, "is not a store URL"),
        (["traces", "--min-depth", f"{2**63}"], 2, "--min-depth"),
        (["traces", "--max-hits", "-1"], 2, "--max-hits"),
        (["traces", "--min-preemptions", "1.5"], 2, "--min-preemptions"),
        (["traces", "--since", "99999999999d"], 2, "between 1970 and 2262"),
        (["traces", "--until", "0001-01-01T00:00:00+23:59"], 2, "between 1970"),
        (["traces", "--since", "9" * 400 + "d"], 2, "is no age"),
        (["traces", "--request", "\udcff"], 2, "is not UTF-8"),
        (["traces", "--by", "request_id"], 2, "--by 'request_id' is not known"),
        (["run", "--http", "BUSY"], 1, "choose another --http"),
        (["run", "--http", "here"], 2, "HOST:PORT or off"),
        (["run", "--otlp", "collector"], 2, "write http://HOST:PORT"),
        (["run", "--log-level", "loud"], 2, "must be one of"),
        (["requests", "--store", "NONE"], 1, "There is no store"),
        (["requests", "--stage", "promotd"], 2, "did you mean promoted?"),
        (["requests", "--since", "yesterday"], 2, "write 90s, 15m, 2h"),
        (["conversations", "--limit", "many"], 2, "--limit"),
        (["helth"], 2, "helth"),
    ],
)
def test_bad_input_gets_one_sentence(
    tmp_path, monkeypatch, capsys, arguments, code, words
):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        (tmp_path / "wrong.toml").write_text('stor = "sqlite:///x.db"')
        (tmp_path / "not.toml").write_text("endpoints: [")
        places = {
            "BUSY": f"127.0.0.1:{busy.getsockname()[1]}",
            "NONE": f"sqlite:///{tmp_path}/none.db",
            "MISSPELT": f"sqlite:///{tmp_path}/new.db?tiemout=5",
            "NO_FOLDER": "sqlite:////no/such/folder/x.db",
            "FOLDER": f"sqlite:///{tmp_path}",
            "NOTES": f"sqlite:///{tmp_path}/not.toml",
            "UNDER_A_FILE": f"sqlite:///{tmp_path}/not.toml/x.db",
            "DAMAGED": damaged_store(tmp_path),
            "BAD_PORT": "postgresql://me:hunter2@host:port/db",
            "WRONG": str(tmp_path / "wrong.toml"),
            "NOT_TOML": str(tmp_path / "not.toml"),
        }
        if arguments[0] == "run" and "--store" not in arguments:
            arguments = [*arguments, "--store", f"sqlite:///{tmp_path}/new.db"]
        given = [places.get(each, each) for each in arguments]
        monkeypatch.setattr("sys.argv", ["event-consumer", *given])
        with pytest.raises(SystemExit) as ended:
            main()
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if " INFO " not in line]
    assert ended.value.code == code, told.err
    assert len(lines) == 1, told.err
    assert words in lines[0]
    assert "hunter2" not in lines[0]


def test_the_console_script_says_it_too():
    result = ask("requests", "--stage", "promotd")
    assert result.returncode == 2
    assert result.stderr == (
        "event-consumer: --stage 'promotd' is not known: did you mean promoted?\n"
    )


# -- the queries -------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A store with two turns of a conversation, a lost request, and a lost range."""
    url = f"sqlite:///{tmp_path_factory.mktemp('asked')}/store.db"
    common = {
        "engine_id": "e",
        "label": "on",
        "conversation_id": "c",
        "session_id": "c",
    }
    with Store(url) as store:
        store.commit(
            ChangeSet.of(
                engines=[EngineRecord(engine_id="e", label="on")],
                requests=[
                    RequestRecord(
                        **common,
                        request_id="one-0",
                        external_request_id="one",
                        status="finished",
                        arrival_ns=10**18,
                        last_event_ns=10**18 + 5,
                        num_prompt_tokens=100,
                        num_cached_tokens=0,
                        retained_boundary=96,
                    ),
                    RequestRecord(
                        **common,
                        request_id="two-0",
                        external_request_id="two",
                        status="finished",
                        arrival_ns=2 * 10**18,
                        last_event_ns=2 * 10**18 + 5,
                        num_prompt_tokens=300,
                        num_cached_tokens=96,
                        source_checkpoint_id=1,
                        no_checkpoint_reason="below_block",
                        hit_limited_by="recurrent_state",
                    ),
                    RequestRecord(
                        engine_id="e",
                        request_id="\x1b[31mevil\n",
                        external_request_id="\x1b[31mevil\n",
                        status="engine_lost",
                        incomplete=True,
                        last_event_ns=3 * 10**18,
                    ),
                ],
                checkpoints=[
                    CheckpointRecord(
                        engine_id="e",
                        checkpoint_id=1,
                        request_id="one-0",
                        stage="evicted",
                        boundary=96,
                        boundary_kind="exact_tail",
                        eviction_reason="lru",
                        num_hits=1,
                    ),
                    CheckpointRecord(
                        engine_id="e",
                        checkpoint_id=2,
                        request_id="two-0",
                        stage="discarded",
                        boundary=192,
                        discard_reason="length",
                    ),
                ],
                streams=[StreamRecord(endpoint="tcp://a:1", num_lost=4)],
                gaps=[
                    GapRecord(
                        endpoint="tcp://a:1",
                        engine_id="e",
                        first_seq=3,
                        end_seq=7,
                        status="lost",
                        detected_ns=1,
                    )
                ],
            )
        )
    return url


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", ["\x1b[31mevil\n", "two", "one"]),
        ("--limit 1", ["\x1b[31mevil\n"]),
        ("--request one", ["one"]),
        ("--request two-0", ["two"]),
        ("--session c", ["two", "one"]),
        ("--label on", ["two", "one"]),
        ("--engine f", []),
        ("--status engine_lost", ["\x1b[31mevil\n"]),
        ("--incomplete", ["\x1b[31mevil\n"]),
        ("--stage evicted", ["one"]),
        ("--stage evicted --max-hits 0", []),
        ("--kind exact_tail", ["one"]),
        ("--reason length", ["two"]),
        ("--reason below_block", ["two"]),
        ("--reason lru", ["one"]),
        ("--limited-by recurrent_state", ["two"]),
        ("--min-depth 96", ["two"]),
        ("--max-depth 95", ["one"]),
        ("--min-prefilled 150", ["two"]),
        ("--since 2030-01-01T00:00:00Z", ["\x1b[31mevil\n", "two"]),
        ("--since 1s", ["\x1b[31mevil\n", "two"]),
    ],
)
def test_requests_are_found(asked, options, expected):

    result = CliRunner().invoke(
        app, ["requests", "--store", asked, "--json", *options.split()]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])["requests"]
    assert [row["external_request_id"] for row in found] == expected


def test_the_shape_of_a_request(asked):
    (row,) = answer("requests", "--store", asked, "--request", "one")["requests"]
    columns = [column.name for column in tables.requests.columns]
    assert list(row) == [*columns, "checkpoints"]
    (checkpoint,) = row["checkpoints"]
    assert list(checkpoint) == [column.name for column in tables.checkpoints.columns]
    assert checkpoint["boundary"] == 96


def test_the_shape_of_a_conversation(asked):
    (row,) = answer("conversations", "--store", asked)["conversations"]
    assert row["conversation_id"] == "c"
    assert row["hit_rate"] == 96 / 400
    assert [turn["external_request_id"] for turn in row["requests"]] == ["one", "two"]


def test_health_shows_what_was_lost(asked):
    health = answer("health", "--store", asked)
    assert health["status"] == "lossy"
    assert health["healthy"] is True
    assert health["num_incomplete_requests"] == 1
    assert health["streams"][0]["consumed"] is False


@pytest.mark.parametrize(
    ("streams", "status", "num_connected", "headline"),
    [
        ([("live", 0)], "ok", 1, "Every stream is whole."),
        (
            [("live", 0), ("disconnected", 0)],
            "disconnected",
            1,
            "1 of 2 streams is not connected: no engine answers at tcp://engine:1.",
        ),
        (
            [("disconnected", 0)] * 5,
            "disconnected",
            0,
            "5 of 5 streams are not connected: no engine answers at tcp://engine:0, "
            "tcp://engine:1, tcp://engine:2 and 2 more.",
        ),
        (
            [("replaying", 0)],
            "replaying",
            1,
            "1 of 1 streams is catching up: tcp://engine:0.",
        ),
        (
            [("live", 60)],
            "disconnected",
            0,
            "1 of 1 streams is not read: no consumer is there for tcp://engine:0.",
        ),
    ],
)
def test_health_calls_only_live_streams_whole(
    sqlite_url, streams, status, num_connected, headline
):
    records = [
        StreamRecord(
            endpoint=f"tcp://engine:{i}",
            state=state,
            updated_ns=time.time_ns() - silent_s * 10**9,
        )
        for i, (state, silent_s) in enumerate(streams)
    ]
    with Store(sqlite_url) as store:
        store.commit(ChangeSet.of(streams=records))
    told = ask("health", "--store", sqlite_url)
    assert told.returncode == 0
    assert told.stdout.splitlines()[0] == headline
    assert ("whole" in told.stdout) == (status == "ok")
    health = answer("health", "--store", sqlite_url)
    assert (health["status"], health["num_connected"]) == (status, num_connected)
    assert health["healthy"] is True


def test_what_was_lost_does_not_make_a_broken_stream_whole(asked):
    told = ask("health", "--store", asked).stdout.splitlines()
    assert told[:2] == [
        "Something was lost before.",
        "1 of 1 streams is not read: no consumer is there for tcp://a:1.",
    ]


def test_a_missing_store_is_told_by_its_whole_path(tmp_path, monkeypatch):
    """A relative URL alone does not say which folder was looked in."""
    monkeypatch.chdir(tmp_path)
    told = ask("health", "--store", "sqlite:///none.db")
    where = f"sqlite:///none.db (the file {tmp_path}/none.db)"
    assert f"There is no store at {where} yet:" in told.stderr


def test_health_without_a_store_says_so_in_json_too(sqlite_url):
    told = ask("health", "--store", sqlite_url, "--json")
    assert told.returncode == 1
    (line,) = told.stdout.splitlines()
    found = json.loads(line)
    assert (found["status"], found["healthy"]) == ("error", False)
    assert "there is no store" in found["error"]
    assert "There is no store" in told.stderr


def test_a_terminal_does_not_obey_an_id(asked):
    result = ask("requests", "--store", asked)
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert "evil" in result.stdout
