"""Experiment 4: a reused state is the state.

``against_uninterrupted``: a request that never stopped is replayed as one that
stopped (by a real stop token) and one that continues from the exact tail. Tokens and
log-probabilities are compared position by position.

``concurrent``: conversations of several turns at once in a pool that is almost too
small. Numbers differ between batch sizes already, so every answer's first and last
but one token are compared with the same prompt uncached by how their distributions
correlate, beside what stock vLLM gives without a hit. What wrong states would give
is computed too, so that the comparison is seen able to fail.
"""

from __future__ import annotations

import random
import statistics
import time
from statistics import median
from typing import Any

from arms import (
    ballast,
    counted_one_steps,
    counted_preemptions,
    empty_cache,
    switch,
)
from generate import Answer, Session, ask, params, random_tokens, stopping_at
from listen import counted_events
from model import redraw

TOP = 20
PROBES = range(5, 505, 5)
"""Tokens whose log-probabilities stand for a distribution."""
PROBED = {"logprobs": len(PROBES), "logprob_token_ids": list(PROBES)}


def against_uninterrupted(
    engine: Any, dialogs: int = 20, arm: str = "exact_tail", after: int = 32
) -> dict[str, Any]:
    """``dialogs`` greedy continuations after a hit."""
    scheduler = engine.engine_core.engine_core.scheduler
    block = scheduler.kv_cache_manager.coordinator.scheduler_block_size
    # Async scheduling has run the stop token by the time it sees it.
    overrun = 1 if engine.engine_core.engine_core.batch_queue is not None else 0
    source = random.Random(4)
    rows = []
    for dialog in range(dialogs):
        answer_tokens = source.randrange(40, 200)
        prompt_tokens = source.randrange(40, 2 * block)
        if dialog % 4 == 3:
            # The tail ends in the last few tokens of a block, which stock vLLM's
            # block copy may leave behind.
            prompt_tokens += block - 8 - (prompt_tokens + answer_tokens) % block
        prompt = random_tokens(prompt_tokens, ("truth", dialog))
        switch(engine, "stock")
        whole = ask(
            engine, prompt, params(max_tokens=answer_tokens + 64 + after, logprobs=TOP)
        )
        length = _first_unseen(whole.tokens, answer_tokens)
        if length is None:
            rows.append({"skipped": "the answer repeats itself"})
            continue
        switch(engine, arm)
        stopped = ask(
            engine,
            prompt,
            params(max_tokens=length + 64, stop_token_ids=[whole.tokens[length - 1]]),
        )
        same_until_stop = stopped.tokens == whole.tokens[:length]
        # One token behind the tail: it runs as the decode step that never came.
        known = length + overrun
        resumed = ask(
            engine,
            prompt + whole.tokens[:known],
            params(max_tokens=after, logprobs=TOP),
        )
        reference = whole.tokens[known : known + after]
        uncached = ask(
            engine,
            prompt + whole.tokens[:known],
            params(max_tokens=1, logprobs=TOP, skip_reading_prefix_cache=True),
        )
        live = whole.logprobs[known : known + after]
        rows.append(
            {
                "prompt": prompt_tokens,
                "stopped_at": length,
                "cached": resumed.cached,
                "executed": prompt_tokens + known - 1,
                "in_block": resumed.cached % block,
                "same_until_stop": same_until_stop,
                "tokens_equal": resumed.tokens == reference,
                "agree": _agreement(resumed.tokens, reference),
                "exact_logprobs": resumed.logprobs == live,
                "dlogprob": max(
                    _distance(a, b)
                    for a, b in zip(
                        resumed.logprobs,
                        live[: _agreement(resumed.tokens, reference) + 1],
                        strict=False,
                    )
                ),
                "floor": _distance(uncached.logprobs[0], live[0]),
                "distinct_tokens": len(set(reference)),
            }
        )
    empty_cache(engine)
    done = [row for row in rows if "skipped" not in row]
    return {
        "arm": arm,
        "dialogs": len(done),
        "equal": sum(row["tokens_equal"] for row in done),
        "exact_logprobs": sum(row["exact_logprobs"] for row in done),
        "max_dlogprob": max(row["dlogprob"] for row in done),
        "floor_median": median(row["floor"] for row in done),
        "floor_max": max(row["floor"] for row in done),
        "rows": rows,
    }


def concurrent(
    engine: Any,
    arm: str,
    available: int,
    conversations: int = 32,
    turns: int = 3,
    longest_prompt: int = 1800,
    check_every: int = 1,
) -> dict[str, Any]:
    """``conversations`` at once, turn by turn, in ``available`` blocks; every
    ``check_every``-th answer is checked."""
    switch(engine, arm)
    answers: list[Answer] = []
    start = time.perf_counter()
    with (
        ballast(engine, available),
        counted_preemptions(engine) as preempted,
        counted_one_steps(engine) as in_one_step,
    ):
        said: list[list[int]] = [[] for _ in range(conversations)]
        for turn in range(turns):
            source = random.Random(f"concurrent-{turn}")
            session = Session(engine)
            batch = []
            for conversation in range(conversations):
                new = (
                    source.randrange(40, longest_prompt)
                    if turn == 0
                    else source.randrange(8, 80)
                )
                said[conversation] += random_tokens(
                    new, ("concurrent", conversation, turn)
                )
                length = source.randrange(30, 250)
                sampling = stopping_at(length, **PROBED)
                batch.append(session.add(said[conversation], sampling))
            session.run()
            for conversation, answer in enumerate(batch):
                said[conversation] += answer.tokens
            answers += batch
    elapsed = time.perf_counter() - start
    result = {
        "arm": arm,
        "available_blocks": available,
        "conversations": conversations,
        "turns": turns,
        "wall_s": round(elapsed, 2),
        "stopped": sum(answer.finish_reason == "stop" for answer in answers),
        "preemptions": len(preempted),
        "cached": sum(answer.cached for answer in answers),
        "prompt": sum(len(answer.prompt) for answer in answers),
        "hits": sum(answer.cached > 0 for answer in answers),
        "hits_inside_a_unit": sum(answer.cached % 16 > 0 for answer in answers),
        "in_one_step": len(in_one_step),
    }
    return result | check(engine, answers[::check_every])


def storm(
    engine: Any,
    arm: str,
    available: int,
    seconds: float = 40.0,
    conversations: int = 32,
    longest: int = 3000,
    answer: int = 200,
    checked: int = 60,
) -> dict[str, Any]:
    """Conversations whose next turn comes at once, so that most of them hit, in a pool
    too small for all: hits inside blocks, many a step, beside preemptions and aborts.

    Now and then many are aborted and come back together. See :func:`_next_prompt` for
    what a next turn is.
    """
    switch(engine, arm)
    source = random.Random(11)
    histories = [
        random_tokens(source.randrange(16, longest // 2), ("storm", i))
        for i in range(conversations)
    ]
    last: list[Answer | None] = [None] * conversations
    finished: list[Answer] = []
    counts = {"stop": 0, "length": 0, "abort": 0, "started": 0, "regenerated": 0}
    open_by: dict[int, Answer] = {}
    most_hits_at_once = 0
    session = Session(engine)

    def start(i: int) -> None:
        prompt, again = _next_prompt(source, histories, last, i, longest)
        length = source.randrange(2, answer)
        # Log-probabilities make a step several times as long.
        probed = PROBED if source.random() < 0.15 else {}
        sampling = (
            params(max_tokens=length, **probed)
            if source.random() < 0.15
            else stopping_at(length, **probed)
        )
        open_by[i] = session.add(prompt, sampling)
        counts["started"] += 1
        counts["regenerated"] += again

    def end(i: int) -> None:
        ended = last[i] = open_by.pop(i)
        counts[ended.finish_reason or "stop"] += 1
        histories[i] = ended.prompt + ended.tokens

    with (
        counted_events() as received,
        ballast(engine, available),
        counted_preemptions(engine) as preempted,
        counted_one_steps(engine) as in_one_step,
    ):
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline or len(session):
            if time.perf_counter() < deadline:
                for i in range(conversations):
                    if i not in open_by:
                        start(i)
            waiting = [one for one in open_by.values() if not one.tokens]
            done = session.step()
            hits_now = sum(bool(one.tokens and one.cached) for one in waiting)
            most_hits_at_once = max(most_hits_at_once, hits_now)
            for i, one in list(open_by.items()):
                if any(one is ended for ended in done):
                    end(i)
                    if len(one.tokens) > 2:
                        finished.append(one)
            victims = int(source.random() < conversations / 1000)
            if source.random() < 0.005:
                victims = conversations // 3
            for i in source.sample(list(open_by), min(victims, len(open_by))):
                session.abort(open_by[i])
                end(i)
        session.drain()
    block = engine.engine_core.engine_core.scheduler.block_size
    hit = [answer for answer in finished if answer.cached]
    result = {
        "arm": arm,
        "available_blocks": available,
        "seconds": seconds,
        "conversations": conversations,
        "finished": counts,
        "preemptions": len(preempted),
        "answers": len(finished),
        "hits": len(hit),
        "hits_inside_a_block": sum(answer.cached % block > 0 for answer in hit),
        "hits_inside_a_unit": sum(answer.cached % 16 > 0 for answer in hit),
        "in_one_step": len(in_one_step),
        "most_hits_at_once": most_hits_at_once,
        "cached": sum(answer.cached for answer in finished),
        "prompt": sum(len(answer.prompt) for answer in finished),
        "events_received": received,
    }
    if arm != "stock":
        scheduler = engine.engine_core.engine_core.scheduler
        result["integrity"] = scheduler.check_integrity()._asdict()
    probed = [answer for answer in hit if answer.logprobs]
    return result | check(engine, source.sample(probed, min(checked, len(probed))))


def _next_prompt(
    source: random.Random,
    histories: list[list[int]],
    last: list[Answer | None],
    i: int,
    longest: int,
) -> tuple[list[int], bool]:
    """The next prompt of conversation ``i``, and whether it asks the same again.

    Mostly everything said so far and something new; sometimes the former prompt again,
    the former answer changed somewhere, or another conversation's turn taken up.
    """
    said, former = histories[i], last[i]
    choice = source.random()
    if len(said) > longest:  # goes back, then diverges
        said = said[: source.randrange(16, 700)]
    elif former is not None and choice < 0.1:
        return former.prompt, True
    elif former is not None and choice < 0.25 and len(former.tokens) > 2:
        keep = len(former.prompt) + source.randrange(1, len(former.tokens))
        said = said[:keep]
    elif choice < 0.35:
        said = source.choice(histories)
    new = random_tokens(source.randrange(1, 60), (i, len(said), source.random()))
    return said + new, False


def check(engine: Any, answers: list[Answer]) -> dict[str, Any]:
    """Compare answers with the same prompts uncached: one row a kind of answer.

    A position's distribution is its log-probabilities of ``PROBES``; two of them are
    compared by correlation. ``hit`` and ``missed``: answers that reused something and
    those that did not, at their first and last but one token. The others are what
    wrong states would give: see :func:`_wrong_contexts`.
    """
    places = [
        ("hit" if answer.cached else "missed", answer, position)
        for answer in answers
        for position in (0, len(answer.tokens) - 2)
    ]
    contexts = [answer.prompt + answer.tokens[:at] for _, answer, at in places]
    live = [answer.logprobs[at] for _, answer, at in places]
    for answer in [a for a in answers if a.cached and len(a.tokens) > 2][::3]:
        for name, context in _wrong_contexts(answer).items():
            places.append((name, answer, 0))
            contexts.append(context)
            live.append(answer.logprobs[0])
    references = _uncached(engine, contexts)
    found: dict[str, list[float]] = {}
    worst: dict[str, Any] = {}
    right: dict[int, float] = {}  # by answer, at its first token
    wrong: dict[int, float] = {}
    for (side, answer, at), one, other in zip(places, live, references, strict=True):
        value = correlation(one, other)
        if side not in ("hit", "missed"):
            wrong[id(answer)] = max(value, wrong.get(id(answer), -1.0))
        elif at == 0:
            right[id(answer)] = value
        found.setdefault(side, []).append(value)
        if value <= min(found[side]):
            worst[side] = {
                "cached": answer.cached,
                "prompt": len(answer.prompt),
                "position": at,
                "correlation": round(value, 4),
            }
    nearer = [answer for answer, value in wrong.items() if right[answer] <= value]
    return {
        "correlation": _spread(found),
        "worst": worst,
        "compared_with_wrong": len(wrong),
        "nearer_to_wrong": len(nearer),
    }


def _wrong_contexts(answer: Answer) -> dict[str, list[int]]:
    """What an answer that hit would continue if its state were not its own: the
    state of another conversation, of 16 tokens earlier, of one other token."""
    prompt, cached = answer.prompt, answer.cached
    one = list(prompt)
    one[cached - 1] = (one[cached - 1] + 1) % 500 + 5
    return {
        "other state": random_tokens(cached, ("other", cached)) + prompt[cached:],
        "older state": prompt[: max(cached - 16, 1)] + prompt[cached:],
        "one other token": one,
    }


def calibrate(engine: Any, branches: str = "1 0.25 0.1") -> dict[str, Any]:
    """Draw weights under which a wrong state shows best against the noise of a
    decode step against a prefill, and keep them."""
    switch(engine, "stock")
    rows = []
    for branch in map(float, branches.split()):
        redraw(engine, branch, 1.0 if branch == 1 else 4.0)
        answers = []
        for number in range(6):
            prompt = random_tokens(200 + 250 * number, ("calibrate", number))
            answer = ask(engine, prompt, stopping_at(24, **PROBED))
            answers.append(answer)
        for answer in answers:  # as if half the prompt had been reused
            answer.cached = len(answer.prompt) - 40
        found = check(engine, answers)["correlation"]
        right = found["hit"]["min"]
        wrong = max(v["max"] for k, v in found.items() if k != "hit")
        rows.append({"branch": branch, "margin": right - wrong, **found})
    best = max(rows, key=lambda row: row["margin"])
    redraw(engine, best["branch"], 1.0 if best["branch"] == 1 else 4.0)
    empty_cache(engine)
    return {"kept": best["branch"], "rows": rows}


def _uncached(engine: Any, contexts: list[list[int]]) -> list[dict[int, float]]:
    sampling = params(max_tokens=1, skip_reading_prefix_cache=True, **PROBED)
    answers = []
    for start in range(0, len(contexts), 8):
        session = Session(engine)
        batch = contexts[start : start + 8]
        answers += [session.add(context, sampling) for context in batch]
        session.run()
    return [answer.logprobs[0] for answer in answers]


def correlation(one: dict[int, float], other: dict[int, float]) -> float:
    """Of the log-probabilities of ``PROBES``; 1 is the same distribution."""
    return statistics.correlation([one[t] for t in PROBES], [other[t] for t in PROBES])


def _spread(values: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        side: {
            "positions": len(found),
            "min": round(min(found), 4),
            "median": round(median(found), 4),
            "max": round(max(found), 4),
        }
        for side, found in values.items()
    }


def _first_unseen(tokens: list[int], start: int) -> int | None:
    """The first length from ``start`` on whose last token is new in the answer."""
    for length in range(start, start + 60):
        if tokens[length - 1] not in tokens[: length - 1]:
            return length
    return None


def _agreement(one: list[int], other: list[int]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _distance(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference over the tokens that both lists name; infinite when
    they name none in common."""
    shared = one.keys() & other.keys()
    return max((abs(one[t] - other[t]) for t in shared), default=float("inf"))
