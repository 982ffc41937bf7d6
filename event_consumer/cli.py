"""The ``event-consumer`` command.

``--json`` prints one line, the last of stdout; the log goes to stderr. Exit codes: 0;
1 where something could not be done, or ``health`` finds an open gap; 2 where the
command or the configuration is wrong. Errors are one sentence.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from event_consumer.cli_options import (
    STAGES,
    STATUSES,
    EngineOption,
    IncompleteOption,
    JsonOption,
    LabelOption,
    LimitOption,
    MaxDepthOption,
    MaxHitsOption,
    MinDepthOption,
    MinPrefilledOption,
    MinRecomputedOption,
    SessionOption,
    SinceOption,
    StoreOption,
    one_of,
    parse_time,
    plain,
    print_json,
)
from event_consumer.queries import (
    DEFAULT_LIMIT,
    Filter,
    Row,
    find_conversations,
    find_requests,
)
from event_consumer.queries import (
    health as find_health,
)
from event_consumer.records import DISCONNECTED, LOST, REPLAYING, STOPPED
from event_consumer.settings import SettingsError, load_settings
from event_consumer.store import DEFAULT_URL, Store, StoreError
from event_consumer.traces_cli import traces

app = typer.Typer(
    help="Reads the checkpoint streams of vLLM engines into a store and traces.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

NO_REPLAY: Final = "none"
MAX_NAMED: Final = 3
"""Endpoints that a headline names."""


@app.command()
def run(
    config: Annotated[
        Path | None, typer.Option(help="TOML file; see event_consumer/settings.py.")
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="An engine's stream: tcp://, ipc:// or dns+tcp://."),
    ] = None,
    replay: Annotated[
        list[str] | None,
        typer.Option(help="Its replay endpoint, or `none`; one for each --endpoint."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="sqlite:///PATH or postgresql://USER@HOST/DATABASE "
            f"[default: {DEFAULT_URL}]"
        ),
    ] = None,
    otlp: Annotated[
        str | None, typer.Option(help="OTLP collector, http://HOST:4317 or :4318.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of /healthz and /metrics, or `off`."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error.")] = (
        "info"
    ),
) -> None:
    """Consume until SIGTERM or SIGINT. SIGHUP reads the list of endpoints again."""
    # The SDK and gRPC are imported only where they are needed: queries start fast.
    from event_consumer.run import serve

    _start_logging(log_level)
    given: dict[str, Any] = {"store": store, "otlp": otlp, "http": http}
    given = {name: value for name, value in given.items() if value is not None}
    if endpoint or replay:
        given["endpoints"] = _pair(endpoint or [], replay or [])

    def load():  # type: ignore[no-untyped-def]
        return load_settings(config, os.environ, **given)

    gc.freeze()
    asyncio.run(serve(load(), reload=load, config=config))


def _query(
    find: Callable[[Store, Filter], list[Row]], name: str, columns: dict[str, str]
) -> Callable[..., None]:
    """A command that filters requests."""

    def command(
        store: StoreOption = DEFAULT_URL,
        request: Annotated[
            str | None, typer.Option(help="Request id, external id or trace id.")
        ] = None,
        session: SessionOption = None,
        engine: EngineOption = None,
        label: LabelOption = None,
        status: Annotated[
            str | None, typer.Option(help="open, finished or engine_lost.")
        ] = None,
        stage: Annotated[
            str | None,
            typer.Option(
                help="Has a checkpoint that is now pinned, promoted, published, "
                "discarded, evicted or gone."
            ),
        ] = None,
        reason: Annotated[
            str | None,
            typer.Option(help="Why it left no checkpoint, or why one of its went."),
        ] = None,
        kind: Annotated[
            str | None, typer.Option(help="Has a checkpoint of this boundary kind.")
        ] = None,
        limited_by: Annotated[
            str | None, typer.Option(help="What limited its reuse.")
        ] = None,
        source: Annotated[
            str | None, typer.Option(help="Kind of checkpoint it resumed from.")
        ] = None,
        max_hits: MaxHitsOption = None,
        min_depth: MinDepthOption = None,
        max_depth: MaxDepthOption = None,
        min_prefilled: MinPrefilledOption = None,
        min_recomputed: MinRecomputedOption = None,
        incomplete: IncompleteOption = None,
        since: SinceOption = None,
        limit: LimitOption = DEFAULT_LIMIT,
        as_json: JsonOption = False,
    ) -> None:
        which = Filter(
            request=request,
            session=session,
            engine=engine,
            label=label,
            status=one_of("--status", status, STATUSES),
            stage=one_of("--stage", stage, STAGES),
            reason=reason,
            kind=kind,
            limited_by=limited_by,
            source=source,
            max_hits=max_hits,
            min_depth=min_depth,
            max_depth=max_depth,
            min_prefilled=min_prefilled,
            min_recomputed=min_recomputed,
            incomplete=incomplete,
            since_ns=parse_time("--since", since),
            limit=limit,
        )
        with Store(store, read_only=True) as opened:
            rows = find(opened, which)
        if as_json:
            print_json({name: rows})
            return
        for row in rows:
            row["name"] = row.get("external_request_id") or row.get("request_id")
        _print_table(rows, columns)

    return command


app.command("requests", help="Requests: what each reused, and what it left.")(
    _query(
        find_requests,
        "requests",
        {
            "name": "request",
            "label": "label",
            "status": "status",
            "num_prompt_tokens": "prompt",
            "num_cached_tokens": "reused",
            "num_output_tokens": "output",
            "finish_reason": "finish",
            "retained_boundary": "retained",
            "no_checkpoint_reason": "why none",
        },
    )
)
app.command("conversations", help="Conversations, turn by turn.")(
    _query(
        find_conversations,
        "conversations",
        {
            "conversation_id": "conversation",
            "num_requests": "turns",
            "num_prompt_tokens": "prompt",
            "num_cached_tokens": "reused",
            "hit_rate": "hit rate",
        },
    )
)
app.command("traces")(traces)


@app.command()
def health(store: StoreOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """How the streams are. Exit code 1 where a gap is open, or there is no store."""
    try:
        with Store(store, read_only=True) as opened:
            found = find_health(opened)
    except StoreError as error:
        if as_json:
            print_json({"status": "error", "healthy": False, "error": str(error)})
        raise
    if as_json:
        print_json(found)
    else:
        _print_health(found)
    raise typer.Exit(0 if found["healthy"] else 1)


def main() -> None:
    """The console script."""
    try:
        _refuse_what_is_no_text(sys.argv)
        code = app(standalone_mode=False)
    except SettingsError as error:
        _fail(str(error), 2)
    except StoreError as error:
        _fail(f"{str(error)[0].upper()}{str(error)[1:]}", 1)
    except typer.Abort:
        _fail("Interrupted.", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a usage error of the parser
            raise
        _fail(error.format_message(), 2)
    sys.exit(code or 0)


def _refuse_what_is_no_text(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="replace").decode()
            raise SettingsError(
                f"The argument {shown!r} is not UTF-8: no name in a store is like that."
            ) from None


def _fail(sentence: str, code: int) -> NoReturn:
    print(f"event-consumer: {sentence}", file=sys.stderr)
    sys.exit(code)


def _pair(endpoints: list[str], replays: list[str]) -> list[dict[str, str | None]]:
    """One ``--replay`` belongs to each ``--endpoint``, in order."""
    if len(endpoints) != len(replays):
        raise SettingsError(
            f"There are {len(endpoints)} --endpoint and {len(replays)} --replay: give "
            f"one --replay for each --endpoint (`--replay {NO_REPLAY}` where the "
            "engine has none)."
        )
    return [
        {"endpoint": endpoint, "replay": None if replay == NO_REPLAY else replay}
        for endpoint, replay in zip(endpoints, replays, strict=True)
    ]


def _start_logging(level: str) -> None:
    names = {"debug", "info", "warning", "error"}
    if level.lower() not in names:
        raise SettingsError(
            f"--log-level is {level!r}, and must be one of {', '.join(sorted(names))}."
        )
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
    )


def _print_table(rows: list[Row], columns: dict[str, str]) -> None:
    if not rows:
        print("Nothing found.")
        return
    cells = [list(columns.values())]
    cells += [[_cell(row[name]) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        print("  ".join(padded).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.1%}" if isinstance(value, float) else str(value)
    return plain(text)


def _print_health(found: Row) -> None:
    for sentence in _headline(found):
        print(sentence)
    engines = {engine["engine_id"]: engine for engine in found["engines"]}
    for stream in found["streams"]:
        engine = engines.get(stream["engine_id"])
        stream["engine"] = engine and engine["status"]
        for line in _stream_in_words(stream):
            print(f"{plain(stream['endpoint'])}: {line}")
    _print_table(
        found["streams"],
        {
            "endpoint": "endpoint",
            "state": "state",
            "engine": "engine",
            "applied_seq": "applied",
            "num_events": "events",
            "num_replayed": "replayed",
            "num_lost": "lost",
            "num_dropped": "dropped",
            "num_unknown": "unknown",
            "num_undecodable": "undecodable",
        },
    )
    for gap in found["gaps"]:
        batches = f"[{gap['first_seq']}, {gap['end_seq']})"
        print(f"{gap['status']}: batches {batches} of {plain(gap['endpoint'])}")


def _headline(found: Row) -> Iterator[str]:
    """Of all streams together. That they are whole is said of live ones only."""
    streams = found["streams"]
    if found["num_open_gaps"]:
        yield "A gap is open: batches are missing and not given up yet."
    elif found["status"] == "lossy" and found["num_live"] == len(streams):
        yield "Nothing is missing now, but something was lost before."
    elif found["status"] == "lossy":
        yield "Something was lost before."
    elif not streams:
        yield "No stream has been read yet."
    elif found["num_live"] == len(streams):
        yield "Every stream is whole."
    read = [stream for stream in streams if stream["consumed"]]
    troubles = {
        "not read: no consumer is there for": [s for s in streams if s not in read],
        "not connected: no engine answers at": [
            s for s in read if s["state"] == DISCONNECTED
        ],
        "catching up:": [s for s in read if s["state"] == REPLAYING],
    }
    for trouble, which in troubles.items():
        if which:
            verb = "is" if len(which) == 1 else "are"
            number = f"{len(which)} of {len(streams)} streams"
            yield f"{number} {verb} {trouble} {_endpoints(which)}."


def _endpoints(streams: list[Row]) -> str:
    """The first of them by name: the table has all."""
    names = ", ".join(plain(s["endpoint"]) for s in streams[:MAX_NAMED])
    more = len(streams) - MAX_NAMED
    return f"{names} and {more} more" if more > 0 else names


def _stream_in_words(stream: Row) -> Iterator[str]:
    """What a reader should know about one stream, a sentence each."""
    if stream["engine"] == STOPPED:
        yield "its engine has stopped, in order."
    elif stream["engine"] == LOST:
        yield "its engine is lost: killed, replaced, or out of reach."
    if not stream["consumed"]:
        yield "no consumer has written it for 10 s."
    if stream["num_undecodable"]:
        yield (
            f"{stream['num_undecodable']} frames or events did not decode, or were not "
            "the engine's; the consumer's log says why."
        )
    if stream["num_unknown"]:
        yield (
            f"{stream['num_unknown']} events are of types that this version does not "
            "know: upgrade event-consumer."
        )


if __name__ == "__main__":
    main()
