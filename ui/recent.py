"""Keeps the answer of a costly question for a moment, for everybody who looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Final

FRESH_S: Final = 0.9
REST: Final = 4.0
"""An answer that took t seconds is kept REST * t: a fifth of a core at most."""


class RecentAnswers:
    """Answers by question; safe from many threads. An error is not kept."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._answers: dict[Hashable, tuple[float, Any]] = {}

    def ask(self, question: Hashable, compute: Callable[[], Any]) -> Any:
        """The answer to ``question``: computed, unless a recent one is still good."""
        with self._lock:
            kept = self._answers.get(question)
            if kept is not None and time.monotonic() < kept[0]:
                return kept[1]
        started = time.monotonic()
        answer = compute()
        ended = time.monotonic()
        good_until = ended + max(FRESH_S, REST * (ended - started))
        with self._lock:
            self._answers.pop(question, None)
            self._answers[question] = (good_until, answer)
            while len(self._answers) > self._limit:
                del self._answers[next(iter(self._answers))]
        return answer
