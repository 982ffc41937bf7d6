"""Drive an in-process engine request by request, with a clock."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

STOP = 2
"""The stop token; prompts never contain it."""

_ids = itertools.count()


@dataclass
class Answer:
    """What one request gave; times in seconds from its submission."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cached: int = 0
    finish_reason: str | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def decode_ms(self) -> float:
        """Milliseconds a token after the first."""
        steps = max(len(self.tokens) - 1, 1)
        return 1e3 * (self.last_token_s - self.first_token_s) / steps


def random_tokens(count: int, seed: object, vocabulary: int = 500) -> list[int]:
    """``count`` ordinary token ids that depend on ``seed`` alone."""
    source = random.Random(repr(seed))
    return [source.randrange(5, vocabulary) for _ in range(count)]


def params(**arguments: Any) -> Any:
    """Greedy sampling without any stop token of the model's own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **arguments,
    )


def stopping_at(length: int, **arguments: Any) -> Any:
    """An answer of exactly ``length`` tokens, the last of them a real stop token."""
    return params(
        max_tokens=length + 64,
        min_tokens=length - 1,
        stop_token_ids=[STOP],
        logit_bias={STOP: 100.0},
        **arguments,
    )


class Session:
    """Requests under way; :meth:`step` advances all of them by one engine step."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.core = engine.engine_core.engine_core
        self._open: dict[str, tuple[Answer, float]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, prompt: Sequence[int], sampling: Any) -> Answer:
        name = f"bench-{next(_ids)}"
        answer = Answer(list(prompt))
        self._open[name] = (answer, time.perf_counter())
        self.engine.add_request(name, {"prompt_token_ids": answer.prompt}, sampling)
        return answer

    def abort(self, answer: Answer) -> None:
        for name, (candidate, _) in list(self._open.items()):
            if candidate is answer:
                self.engine.abort_request([name])
                del self._open[name]
                answer.finish_reason = "abort"

    def step(self) -> list[Answer]:
        """One engine step; the answers that it finished."""
        finished = []
        for output in self.engine.step():
            if output.request_id not in self._open:  # aborted meanwhile
                continue
            answer, start = self._open[output.request_id]
            now = time.perf_counter() - start
            completion = output.outputs[0]
            if completion.token_ids:
                if not answer.tokens:
                    answer.first_token_s = now
                    answer.cached = output.num_cached_tokens or 0
                answer.tokens.extend(completion.token_ids)
                answer.last_token_s = now
            for position in completion.logprobs or ():
                answer.logprobs.append(
                    {token: item.logprob for token, item in position.items()}
                )
            if output.finished:
                answer.finish_reason = completion.finish_reason
                del self._open[output.request_id]
                finished.append(answer)
        return finished

    def run(self, after_step: Callable[[], None] | None = None) -> None:
        """Step until every request has ended and no step is in flight."""
        while self._open:
            self.step()
            if after_step is not None:
                after_step()
        self.drain()

    def drain(self) -> None:
        """Let the step that async scheduling queued behind the last one finish."""
        while self.core.batch_queue or self.core.scheduler.has_requests():
            self.engine.step()


def ask(engine: Any, prompt: Sequence[int], sampling: Any) -> Answer:
    """One request alone."""
    session = Session(engine)
    answer = session.add(prompt, sampling)
    session.run()
    return answer
