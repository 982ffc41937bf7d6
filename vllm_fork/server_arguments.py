"""What of ``vllm serve``'s arguments can be judged before anything is loaded.

The server and the doctor look here for the model and the address, of which vLLM
itself tells in a traceback.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import Final

MAX_PORT: Final = 65_535


def why_no_model(arguments: argparse.Namespace) -> str | None:
    """One sentence if no model is named, or a folder that is not there.

    Args:
        arguments: those of ``vllm serve``, parsed. ``model`` must be that of
            ``model_tag`` where there is one; without one it is vLLM's default.
    """
    from vllm.engine.arg_utils import EngineArgs

    if arguments.model_tag is None and arguments.model == EngineArgs.model:
        return (
            "No model is named: name its folder, or the id of a repository "
            "(organisation/name), before the other arguments."
        )
    if _can_only_be_a_folder(arguments.model) and not Path(arguments.model).exists():
        return (
            f"There is no folder {arguments.model}: name that of a model, or the id "
            "of a repository (organisation/name)."
        )
    return None


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
    if arguments.uds:
        if Path(arguments.uds).exists():
            return (
                f"--uds {arguments.uds} exists already: stop the server that listens "
                "there, remove the file, or name another."
            )
        return None
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
