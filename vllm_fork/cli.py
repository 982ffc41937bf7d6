"""The ``vllm-fork`` command. Importing it loads neither vLLM nor torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

import vllm_fork

USAGE_ERROR = 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="vLLM for hybrid models that keeps the state a conversation will need again.",
)

_PASS_THROUGH = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
}


def _fail(sentence: object, code: int = USAGE_ERROR) -> NoReturn:
    typer.echo(f"vllm-fork: {sentence}", err=True)
    raise typer.Exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(vllm_fork.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="And exit."),
    ] = False,
) -> None:
    pass


@app.command(context_settings=_PASS_THROUGH)
def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [ARGUMENTS]",
            help="As for `vllm serve`: see `vllm-fork serve MODEL --help`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """`vllm serve` with decode checkpoints retained and lifecycle events sent.

    Everything after it goes to `vllm serve` as it is. Settings are in the
    environment: VLLM_PREFIX_CACHE_RETAIN_DECODE_CHECKPOINTS=0|1 (1 here) and
    VLLM_CHECKPOINT_RETENTION, a JSON object (docs/events.md). An OTLP endpoint in
    OpenTelemetry's variables becomes --otlp-traces-endpoint.
    """
    from vllm_fork.serve import ServeError
    from vllm_fork.serve import serve as run

    try:
        run(arguments or [])
    except ServeError as error:
        _fail(error)


@app.command(context_settings=_PASS_THROUGH)
def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [ARGUMENTS]",
            help="The model, and the arguments that `vllm-fork serve` would get.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One line, the last of stdout.")
    ] = False,
) -> None:
    """Say whether retention would be on here, and if not why.

    Exits with 0 if it would be on, with 1 if not.
    """
    from vllm_fork.doctor import examine

    # After the model everything is vLLM's, but for this; vLLM has no such option.
    as_json = as_json or "--json" in (arguments or [])
    report = examine([a for a in arguments or [] if a != "--json"], os.environ)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        for line in report.lines():
            typer.echo(line)
    raise typer.Exit(0 if report.healthy else 1)


@app.command()
def replay(
    dialog: Annotated[
        str, typer.Option(help="`reference`, or a JSON file of turns.")
    ] = "reference",
    retain: Annotated[int, typer.Option(min=0, max=1)] = 1,
    exact_tail: Annotated[
        int | None,
        typer.Option(min=0, max=1, help="Default: whatever retention does by default."),
    ] = None,
    copy_interval: Annotated[
        int, typer.Option(help="Tokens between rolling copies; 0: none.")
    ] = 0,
    scheduler: Annotated[
        Literal["sync", "async"], typer.Option(help="Which of vLLM's schedulers.")
    ] = "sync",
    as_json: Annotated[
        bool, typer.Option("--json", help="One line, the last of stdout.")
    ] = False,
) -> None:
    """Replay a dialog on the real scheduler and KV-cache manager, without a model.

    The reference dialog is that of vLLM PR 50551, with the lengths of its stock arm
    (--retain 0) or of its retained one.
    """
    from vllm_fork.replay import CheckFailed, ReplayError, load_dialog, run

    try:
        result = run(
            load_dialog(dialog, bool(retain)),
            retain=bool(retain),
            exact_tail=None if exact_tail is None else bool(exact_tail),
            copy_interval=copy_interval,
            scheduler=scheduler,
        )
    except ReplayError as error:
        _fail(error)
    except CheckFailed as error:
        _fail(error, 1)
    except ImportError as error:
        _fail(_missing(error), 1)
    typer.echo(json.dumps(result.as_dict()) if as_json else result.table())


@app.command("tiny-model")
def tiny_model(
    directory: Annotated[Path, typer.Argument(help="Made if it does not exist.")],
) -> None:
    """Write the tiny hybrid model and its tokenizer, which a CPU serves at once."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of writing one file
    try:
        from vllm_fork.tiny_model import holds_another_model, write_tiny_model
    except ImportError as error:
        _fail(_missing(error), 1)
    if holds_another_model(directory):
        _fail(f"{directory} holds another model already: name a new folder.", 1)
    try:
        write_tiny_model(directory)
    except OSError as error:
        _fail(f"{directory} cannot be written: {error.strerror or error}.", 1)
    typer.echo(f"Wrote {directory}: vllm-fork serve {directory}")


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def demo(
    arguments: Annotated[list[str] | None, typer.Argument(show_default=False)] = None,
) -> None:
    """Play a dialog against two real engines, retention off and on, with dashboard."""
    from vllm_fork.demo.__main__ import app as demo_app

    demo_app(arguments or [], prog_name="vllm-fork demo")


def _missing(error: ImportError) -> str:
    return f"{error}: install vllm-fork[cuda] or vllm-fork[cpu]."


def main() -> None:
    """The console script."""
    app(prog_name="vllm-fork")


if __name__ == "__main__":
    main()
