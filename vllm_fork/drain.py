"""Ends the requests of an engine that is to stop, before the engine is killed.

An engine that drains (``--shutdown-timeout`` above 0) never looks at the clock: its
front end does, and kills it. A request longer than the time-out would then end without
its last events and the stream without its own, and vLLM 0.32.0 would leave the client
of that request waiting, and itself for the client.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

logger = logging.getLogger(__name__)

GOODBYE_S: Final = 2.0
"""Of the time-out, what is kept for telling clients and stream; half of it at most.
A step under way comes out of it as well."""

_BEGAN: Final = "_drain_began_at"


def drain_time_s(shutdown_timeout: float) -> float:
    """How long requests may go on, in seconds, once the engine is to stop."""
    return shutdown_timeout - min(GOODBYE_S, shutdown_timeout / 2)


def bounded(
    original: Callable[[EngineCoreProc], bool],
) -> Callable[[EngineCoreProc], bool]:
    """Wraps ``EngineCoreProc._handle_shutdown``, which each turn of the engine's loop
    asks whether there is a next one. Does what vLLM does where no events are sent."""

    def _handle_shutdown(core: EngineCoreProc) -> bool:
        goes_on = original(core)
        if not goes_on or core.is_running():
            return goes_on
        timeout = core.vllm_config.shutdown_timeout
        if not timeout or getattr(core.scheduler, "publisher", None) is None:
            return True
        now = time.monotonic()
        began = core.__dict__.setdefault(_BEGAN, now)
        if now - began < drain_time_s(timeout):
            return True
        _abort_all(core)
        return bool(core.has_work())

    return _handle_shutdown


def _abort_all(core: EngineCoreProc) -> None:
    """As vLLM does it at once where the time-out is 0."""
    from vllm.v1.request import RequestStatus

    count = core.scheduler.get_num_unfinished_requests()
    if not count:
        return
    logger.warning(
        "%d request(s) have not ended within the time for draining and are aborted: "
        "give them more with --shutdown-timeout (%d s now).",
        count,
        core.vllm_config.shutdown_timeout,
    )
    aborted = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    core._send_abort_outputs(aborted)
