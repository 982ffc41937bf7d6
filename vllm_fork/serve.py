"""``vllm-fork serve``: ``vllm serve`` with retention and its events on.

The arguments are vLLM's own, all of them. What differs is the environment
(``VLLM_FORK_SERVE=1``, which every process of the server inherits) and that whatever
is wrong is told in one sentence before anything is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_fork.activation import why_inactive
from vllm_fork.config import (
    SERVE_ENV,
    SettingsError,
    load_settings,
    misspelt_variables,
)
from vllm_fork.server_arguments import (
    unusable,
    why_no_address,
    why_no_files,
    why_no_model,
    why_unparsable,
)

if TYPE_CHECKING:
    import argparse


class ServeError(Exception):
    """The server was not started; the message is one sentence."""


def serve(arguments: Sequence[str]) -> None:
    """Run ``vllm serve`` in this process until it ends.

    Raises:
        ServeError: not started, and why.
    """
    os.environ[SERVE_ENV] = "1"
    for sentence in misspelt_variables(os.environ):
        print(f"vllm-fork: warning: {sentence}", file=sys.stderr)
    problem = why_inactive(os.environ)
    if problem:
        raise ServeError(problem)
    try:
        load_settings(os.environ)
    except SettingsError as error:
        raise ServeError(str(error)) from None
    if problem := why_unparsable(arguments):
        raise ServeError(problem)
    try:
        from vllm.entrypoints.cli.main import main
        from vllm.entrypoints.cli.serve import ServeSubcommand
    except ImportError as error:
        raise ServeError(
            f"vLLM cannot be imported ({error}): install vllm-fork[cuda] or "
            "vllm-fork[cpu]."
        ) from None

    from vllm_fork import plugin

    plugin.serving_pid = os.getpid()
    sys.argv = ["vllm", "serve", *arguments]
    run = ServeSubcommand.cmd
    is_accepted = False

    def checked(parsed: argparse.Namespace) -> None:
        nonlocal is_accepted
        if parsed.model_tag is not None:
            parsed.model = parsed.model_tag
        if problem := (
            why_no_model(parsed) or why_no_address(parsed) or why_no_files(parsed)
        ):
            raise ServeError(problem)
        plugin.register()  # before vLLM does, which has begun to read the model then
        # Its supervisor of many servers configures no engine itself.
        is_accepted = parsed.data_parallel_multi_port_external_lb
        run(parsed)

    ServeSubcommand.cmd = staticmethod(checked)  # type: ignore[assignment, method-assign]
    try:
        main()
    except ServeError:
        raise
    except plugin.StartRefused as error:
        raise ServeError(str(error)) from None
    except Exception as error:
        if is_accepted or plugin.is_engine_configured:
            raise
        raise ServeError(unusable(error)) from None
    finally:
        ServeSubcommand.cmd = staticmethod(run)  # type: ignore[assignment, method-assign]
