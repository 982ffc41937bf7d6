"""Since when the requests of each engine may not have been exported.

A mark is committed with the requests that ended: whatever kills the consumer between
their commit and their export, or while the collector is away, the next one tells them
again. A mark is a bound, not a list: more may be told again than was missing, and ids
are derived, so that what is exported twice is the same spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from event_consumer.records import ClosedRequest

GRID_NS: Final = 10_000_000_000
"""Marks are multiples of this, so that few commits have to write one."""
KEEP_S: Final = 60.0
"""A mark of an engine of which everything was exported goes after that long."""


class ExportMarks:
    """The marks of one consumer: for each engine a time of the engine's clock, at or
    before the last event of every request that may not have been exported."""

    def __init__(self) -> None:
        # The last event of the newest request told, and when it was told.
        self._newest: dict[str, tuple[int, float]] = {}

    def __contains__(self, engine_id: str) -> bool:
        """Whether requests of the engine were told by this consumer."""
        return engine_id in self._newest

    def update(
        self, closed: Iterable[ClosedRequest], untold: Mapping[str, int], now: float
    ) -> dict[str, int]:
        """The marks to commit together with ``closed``.

        Args:
            closed: requests that ended, and are told after the commit.
            untold: for each engine, the oldest last event of those told before that
                have not left yet.
            now: monotonic seconds.
        """
        oldest = dict(untold)
        for request, _, _ in closed:
            engine_id, ends_ns = request.engine_id, request.last_event_ns
            oldest[engine_id] = min(ends_ns, oldest.get(engine_id, ends_ns))
            newest_ns, _ = self._newest.get(engine_id, (ends_ns, now))
            self._newest[engine_id] = max(ends_ns, newest_ns), now
        marks = {}
        for engine_id, (newest_ns, told_at) in list(self._newest.items()):
            if engine_id in oldest or now - told_at < KEEP_S:
                mark = min(newest_ns, oldest.get(engine_id, newest_ns))
                marks[engine_id] = mark // GRID_NS * GRID_NS
            else:
                del self._newest[engine_id]
        return marks
