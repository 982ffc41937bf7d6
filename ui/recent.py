"""Keeps the answer of a costly question for a moment, for everybody who looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Final

FRESH_S: Final = 0.9
REST: Final = 4.0
"""An answer that took t seconds is kept REST * t: a fifth of a core at most."""


class _Kept:
    """An answer, until when it is good, and the lock of whoever computes it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.good_until = float("-inf")
        self.answer: Any = None


class RecentAnswers:
    """Answers by question; safe from many threads. An error is not kept.

    Whoever asks while another computes the same answer waits for that one.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._answers: dict[Hashable, _Kept] = {}

    def ask(self, question: Hashable, compute: Callable[[], Any]) -> Any:
        """The answer to ``question``: computed, unless a recent one is still good."""
        with self._lock:
            kept = self._answers.pop(question, None) or _Kept()
            self._answers[question] = kept  # asked last, forgotten last
            while len(self._answers) > self._limit:
                del self._answers[next(iter(self._answers))]
        with kept.lock:
            started = time.monotonic()
            if started >= kept.good_until:
                kept.answer = compute()
                ended = time.monotonic()
                kept.good_until = ended + max(FRESH_S, REST * (ended - started))
            return kept.answer
