"""Costly answers are kept for a moment, and never longer than they are worth."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ui import recent


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test turns."""

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    turned = Clock()
    monkeypatch.setattr(recent, "time", turned)
    return turned


def test_a_cheap_answer_lasts_less_than_a_refresh(clock):
    answers, asked = recent.RecentAnswers(), []
    for at in (0.0, 0.5, 1.0, 1.2):
        clock.now = 100.0 + at
        answers.ask("q", lambda at=at: asked.append(at))
    assert asked == [0.0, 1.0]


def test_a_costly_answer_leaves_the_store_alone(clock):
    """A question of 2 s is asked again after 8 s, by whoever looks."""
    answers, asked = recent.RecentAnswers(), []

    def compute() -> int:
        asked.append(clock.now)
        clock.now += 2.0
        return len(asked)

    assert answers.ask("q", compute) == 1
    clock.now += 7.9
    assert answers.ask("q", compute) == 1
    clock.now += 0.2
    assert answers.ask("q", compute) == 2


def test_an_error_is_not_kept(clock):
    answers = recent.RecentAnswers()

    def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        answers.ask("q", broken)
    assert answers.ask("q", lambda: 5) == 5


def test_memory_is_bounded(clock):
    answers = recent.RecentAnswers(limit=3)
    for question in range(10):
        answers.ask(question, lambda question=question: question)
    assert len(answers._answers) == 3
    assert answers.ask(9, lambda: "anew") == 9


def test_many_who_ask_at_once_cost_one_answer():
    """Twenty viewers of one page, while the answer takes its time."""
    answers, asked = recent.RecentAnswers(), []
    all_ask = threading.Barrier(20)

    def compute() -> str:
        asked.append(1)
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            pass
        return "answer"

    def view() -> str:
        all_ask.wait(10)
        return answers.ask("q", compute)

    with ThreadPoolExecutor(20) as pool:
        found = [view.result(20) for view in [pool.submit(view) for _ in range(20)]]
    assert found == ["answer"] * 20
    assert len(asked) == 1
