"""What of ``vllm serve``'s arguments can be judged before anything is loaded.

The server and the doctor look here for the model and the address, of which vLLM
itself tells in a traceback.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_fork.model_folder import (
    why_no_configuration,
    why_no_tokenizer,
    why_no_weights,
)

MAX_PORT: Final = 65_535
MAX_GIST: Final = 400
"""Characters of somebody else's error that one sentence can take."""


class ArgumentsRefused(Exception):
    """vLLM would not take these arguments; the message is one sentence."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What ``vllm serve ARGUMENTS`` makes of them: ``--model``, ``--config`` and all.

    Sets ``sys.argv``, where vLLM looks for some of them.

    Raises:
        ArgumentsRefused: vLLM refuses them with an error.
        SystemExit: vLLM's parser refuses them, and has said why on stderr.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if problem := why_unparsable(arguments):
        raise ArgumentsRefused(problem)
    sys.argv = ["vllm", "serve", *arguments]
    parser = FlexibleArgumentParser(prog="vllm")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    try:
        parsed = parser.parse_args(sys.argv[1:])
        command.validate(parsed)
    except Exception as error:
        raise ArgumentsRefused(unusable(error)) from error
    return parsed


def why_unparsable(arguments: Sequence[str]) -> str | None:
    """One sentence on what vLLM's parser fails over with an error that tells nothing.

    Args:
        arguments: those of ``vllm serve``, as they are.
    """
    if arguments and arguments[-1] == "--model":
        return (
            "--model has no value: name the model's folder, or the id of a repository "
            "(organisation/name); it can also be the first argument."
        )
    return None


def unusable(error: Exception) -> str:
    """The sentence for an error of vLLM's over its arguments."""
    return f"vLLM cannot use these arguments: {gist(error)}"


def gist(error: Exception) -> str:
    """An error on one line, not too long; named, where its text alone says little."""
    text = " ".join(str(error).split()).removeprefix("Error: ")
    if not text:
        return type(error).__name__
    if not isinstance(error, (ValueError, TypeError, OSError, AssertionError)):
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text, MAX_GIST, placeholder=" …")


def why_no_model(arguments: argparse.Namespace) -> str | None:
    """One sentence if no model is named, or a folder that cannot be that of one.

    Args:
        arguments: those of ``vllm serve``, parsed. ``model`` must be that of
            ``model_tag`` where there is one; without one it is vLLM's default.
    """
    from vllm.engine.arg_utils import EngineArgs

    model = arguments.model
    if not model or (arguments.model_tag is None and model == EngineArgs.model):
        return (
            "No model is named: name its folder, or the id of a repository "
            "(organisation/name), before the other arguments."
        )
    folder = Path(model)
    if _can_only_be_a_folder(model) and not folder.exists():
        return (
            f"There is no folder {model}: name that of a model, or the id of a "
            "repository (organisation/name)."
        )
    if folder.is_file() and folder.suffix != ".gguf":
        return f"{model} is a file: name the folder that the model is in."
    tokenizer = arguments.tokenizer
    if tokenizer and _can_only_be_a_folder(tokenizer) and not Path(tokenizer).exists():
        return f"There is no folder {tokenizer} for --tokenizer."
    return why_no_configuration(folder)


def why_no_files(arguments: argparse.Namespace) -> str | None:
    """One sentence if the model's folder lacks what the engine will look for.

    Args:
        arguments: as for :func:`why_no_model`. Of a repository nothing is known.
    """
    folder = Path(arguments.model)
    if not folder.is_dir():
        return None
    try:
        if arguments.load_format == "auto" and (why := why_no_weights(folder)):
            return why
        is_looked_for = arguments.tokenizer_mode == "auto" and not (
            arguments.tokenizer or arguments.skip_tokenizer_init
        )
        return why_no_tokenizer(folder) if is_looked_for else None
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror or error}."


def _can_only_be_a_folder(model: str) -> bool:
    """A repository's id has one slash at most, and does not begin with it; vLLM reads
    remote storage by URL."""
    if "://" in model:
        return False
    return model.startswith((".", "~", os.sep)) or model.count(os.sep) > 1


def why_no_address(arguments: argparse.Namespace) -> str | None:
    """One sentence if the HTTP server could not listen where it is told to.

    Binds as vLLM's ``create_server_socket`` does, and lets go of it again.
    """
    if arguments.headless or arguments.data_parallel_multi_port_external_lb:
        return None
    for option in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(arguments, option)
        if path and not Path(path).is_file():
            return f"There is no file {path} for --{option.replace('_', '-')}."
    if arguments.uds:
        return _why_no_socket(Path(arguments.uds))
    host, port = arguments.host or "", arguments.port
    if not 0 <= port <= MAX_PORT:
        return f"--port is {port}: expected a number from 0 to {MAX_PORT}."
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        return (
            f"The server cannot listen on {host or '*'}:{port} ({why}): choose another "
            "--port or --host, or stop what listens there."
        )
    return None


def _why_no_socket(path: Path) -> str | None:
    if path.exists():
        return (
            f"--uds {path} exists already: stop the server that listens there, remove "
            "the file, or name another."
        )
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} for --uds {path}."
    return None
