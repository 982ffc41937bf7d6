"""Replays a multi-turn dialog on the real scheduler and KV-cache manager.

No model runs (see :mod:`vllm_fork.model_free`): what counts is how many prompt
tokens of each turn the prefix cache serves. The reference dialog is the A/B run of
vLLM PR 50551 with its 35B-A3B model: blocks of 1056 tokens, prefixes matched every
16 tokens. Its two arms sampled answers of their own, hence a column of lengths each.

Importing this module loads neither vLLM nor torch; :func:`run` does.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from vllm_fork.config import ENVIRONMENT_VARIABLES, nearest

if TYPE_CHECKING:
    from vllm_fork.model_free import ModelFreeEngine

BLOCK_SIZE: Final = 1056
HASH_UNIT: Final = 16
MAX_DIALOG_TOKENS: Final = 1_000_000

SchedulerName = Literal["sync", "async"]


class ReplayError(ValueError):
    """A dialog or an option cannot be used; the message is one sentence."""


class CheckFailed(RuntimeError):
    """The replay ran but something it must leave in order is not; one sentence."""


class Turn(NamedTuple):
    """One request: lengths in tokens.

    ``prompt`` counts the whole prompt, all former turns among it; ``completion``
    counts the stop token that ends it.
    """

    prompt: int
    completion: int


REFERENCE: Final[dict[bool, tuple[Turn, ...]]] = {
    False: (
        Turn(61, 3613),
        Turn(3729, 4374),
        Turn(8151, 2950),
        Turn(11145, 1977),
        Turn(13168, 8126),
    ),
    True: (
        Turn(61, 3518),
        Turn(3634, 4080),
        Turn(7763, 3071),
        Turn(10878, 1290),
        Turn(12214, 2935),
    ),
}
"""Lengths of the reference's stock arm (False) and of its retained arm (True)."""


@dataclass(frozen=True)
class ReplayedTurn:
    """A turn and the prompt tokens of it that the prefix cache served."""

    prompt: int
    completion: int
    cached: int


@dataclass(frozen=True)
class ReplayResult:
    """What a replay reused."""

    turns: tuple[ReplayedTurn, ...]

    @property
    def cached(self) -> int:
        return sum(turn.cached for turn in self.turns)

    @property
    def prompt(self) -> int:
        return sum(turn.prompt for turn in self.turns)

    @property
    def completion(self) -> int:
        return sum(turn.completion for turn in self.turns)

    @property
    def hit_rate(self) -> float:
        """Cached tokens a prompt token: a fraction."""
        return self.cached / self.prompt

    def as_dict(self) -> dict[str, Any]:
        """The shape of ``vllm-fork replay --json``."""
        return {
            "turns": [vars(turn).copy() for turn in self.turns],
            "cached": self.cached,
            "prompt": self.prompt,
            "completion": self.completion,
            "hit_rate": self.hit_rate,
        }

    def table(self) -> str:
        """The same for people."""
        rows = [
            ("turn", "prompt", "completion", "cached", "hit rate"),
            *(
                _row(str(i), turn.prompt, turn.completion, turn.cached)
                for i, turn in enumerate(self.turns)
            ),
            _row("all", self.prompt, self.completion, self.cached),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) for cell, width in zip(row, widths, strict=True)
            )
            for row in rows
        )


def _row(name: str, prompt: int, completion: int, cached: int) -> tuple[str, ...]:
    return (
        name,
        f"{prompt:,}",
        f"{completion:,}",
        f"{cached:,}",
        f"{cached / prompt:.1%}",
    )


def load_dialog(dialog: str, retain: bool) -> tuple[Turn, ...]:
    """The dialog ``reference``, or the one in a JSON file.

    Args:
        dialog: ``reference`` or the path of a file such as
            ``{"turns": [{"prompt": 61, "completion": 300}, …]}``.
        retain: which arm of the reference.

    Raises:
        ReplayError: no such file, or not such a dialog.
    """
    if dialog == "reference":
        return REFERENCE[retain]
    try:
        text = Path(dialog).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ReplayError(
            f"the dialog {dialog!r} is no file{nearest(dialog, ['reference'])}: "
            "expected 'reference' or the path of a JSON file."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ReplayError(f"the dialog {dialog!r} cannot be read: {reason}.") from None
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ReplayError(f"the dialog {dialog!r} is not JSON: {error}.") from None
    return _parse_turns(dialog, content)


def _parse_turns(name: str, content: Any) -> tuple[Turn, ...]:
    turns = content.get("turns") if isinstance(content, dict) else None
    if not isinstance(turns, list) or not turns or len(content) != 1:
        raise ReplayError(
            f'the dialog {name!r} is not {{"turns": […]}}: expected one object with '
            "nothing but a list of at least one turn."
        )
    parsed: list[Turn] = []
    total = 0
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict) or set(turn) != {"prompt", "completion"}:
            raise ReplayError(
                f"turn {i} of the dialog {name!r} is not "
                '{"prompt": …, "completion": …}: expected these two lengths in tokens.'
            )
        for key, value in turn.items():
            if type(value) is not int or value < 1:
                raise ReplayError(
                    f"turn {i} of the dialog {name!r} has the {key} "
                    f"{json.dumps(value)}: expected a length of at least 1 token."
                )
        if turn["prompt"] <= total:
            raise ReplayError(
                f"turn {i} of the dialog {name!r} has a prompt of {turn['prompt']} "
                f"tokens, but it repeats the {total} of the turns before and adds "
                f"some: expected at least {total + 1}."
            )
        total = turn["prompt"] + turn["completion"]
        if total > MAX_DIALOG_TOKENS:
            raise ReplayError(
                f"turn {i} of the dialog {name!r} ends at token {total}: at most "
                f"{MAX_DIALOG_TOKENS} are replayed."
            )
        parsed.append(Turn(turn["prompt"], turn["completion"]))
    return tuple(parsed)


def run(
    dialog: Sequence[Turn],
    *,
    retain: bool = True,
    exact_tail: bool | None = None,
    copy_interval: int = 0,
    scheduler: SchedulerName = "sync",
    num_mamba_groups: int = 1,
    seed: int = 1,
) -> ReplayResult:
    """Play ``dialog``, each turn ended by a real stop token, and check the rest.

    The environment's settings of retention are not looked at. ``exact_tail``: None
    leaves it to the engine. ``copy_interval`` in tokens. ``seed`` draws the token
    ids.

    Raises:
        ReplayError: an option that cannot be used.
        CheckFailed: a block leaked, the prefix cache does not reset, a checkpoint
            has not exactly one end, or a request met a state that is not its own.
    """
    _check_options(retain, exact_tail, copy_interval)
    settings: dict[str, Any] = {"retain": retain}
    if exact_tail is not None:
        settings["exact_tail"] = exact_tail
    if copy_interval:
        settings["copy_interval"] = copy_interval
    with _without_environment():
        engine = _make_engine(dialog, settings, scheduler, num_mamba_groups)
    _check_engine(engine, exact_tail, copy_interval)
    cached = _play(engine, dialog, random.Random(seed))
    _check_leftovers(engine)
    return ReplayResult(
        tuple(
            ReplayedTurn(turn.prompt, turn.completion, tokens)
            for turn, tokens in zip(dialog, cached, strict=True)
        )
    )


def _check_options(retain: bool, exact_tail: bool | None, copy_interval: int) -> None:
    if not retain and exact_tail:
        raise ReplayError(
            "--exact-tail 1 keeps checkpoints and --retain 0 keeps none: drop one."
        )
    if not retain and copy_interval:
        raise ReplayError(
            f"--copy-interval {copy_interval} makes checkpoints and --retain 0 keeps "
            "none: drop one."
        )
    if copy_interval < 0 or copy_interval % HASH_UNIT:
        raise ReplayError(
            f"--copy-interval is {copy_interval} tokens: expected 0 or a multiple of "
            f"{HASH_UNIT}, the granularity at which prefixes are matched."
        )


@contextmanager
def _without_environment() -> Iterator[None]:
    kept = {k: os.environ.pop(k) for k in ENVIRONMENT_VARIABLES if k in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _make_engine(
    dialog: Sequence[Turn],
    settings: dict[str, Any],
    scheduler: SchedulerName,
    num_mamba_groups: int,
) -> ModelFreeEngine:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_fork.model_free import make_engine, with_recorded_checkpoints

    is_async = scheduler == "async"
    longest = max(turn.prompt + turn.completion for turn in dialog)
    num_blocks = longest // BLOCK_SIZE * 2 + 50 * (1 + num_mamba_groups)
    return make_engine(
        with_recorded_checkpoints(AsyncScheduler if is_async else Scheduler),
        async_scheduling=is_async,
        block_size=BLOCK_SIZE,
        hash_unit=HASH_UNIT,
        num_mamba_groups=num_mamba_groups,
        num_blocks=num_blocks,
        max_model_len=longest + BLOCK_SIZE,
        settings=settings,
    )


def _check_engine(
    engine: ModelFreeEngine, exact_tail: bool | None, copy_interval: int
) -> None:
    started = engine.events.started
    if exact_tail and started.exact_tail != "on":
        raise ReplayError(
            f"--exact-tail 1 does not work in this engine ({started.exact_tail}): use "
            "--exact-tail 0."
        )
    if copy_interval and started.copy_interval != copy_interval:
        raise ReplayError(
            f"--copy-interval {copy_interval} does not work in this engine: use "
            "--copy-interval 0."
        )


def _play(
    engine: ModelFreeEngine, dialog: Sequence[Turn], rng: random.Random
) -> list[int]:
    """Each turn's cached tokens."""
    from vllm_fork.model_free import STOP_TOKEN, make_request

    def draw(count: int) -> list[int]:
        return [rng.randrange(STOP_TOKEN + 1, 512) for _ in range(count)]

    history: list[int] = []
    cached = []
    for i, turn in enumerate(dialog):
        prompt = history + draw(turn.prompt - len(history))
        completion = [*draw(turn.completion - 1), STOP_TOKEN]
        request_id = f"turn-{i}"
        engine.add(make_request(request_id, prompt, hash_unit=HASH_UNIT), completion)
        engine.run(max_steps=turn.prompt + 2 * turn.completion + 100)
        record = engine.finished[request_id]
        if record.finish_reason != "stop":
            raise CheckFailed(
                f"turn {i} ended by {record.finish_reason}, not by its stop token."
            )
        cached.append(record.cached_tokens or 0)
        history = prompt + completion
    return cached


def _check_leftovers(engine: ModelFreeEngine) -> None:
    from vllm_fork.model_free import PrefixCacheAudit

    if engine.worker.errors:
        error = engine.worker.errors[0]
        raise CheckFailed(
            f"{len(engine.worker.errors)} steps met a wrong state, first "
            f"{error.request_id} at token {error.position}: {error.problem}."
        )
    wrong = PrefixCacheAudit(engine).problems()
    if wrong:
        raise CheckFailed(
            f"{len(wrong)} entries of the prefix cache are wrong: {wrong[0]}."
        )
    if engine.num_leaked_blocks:
        raise CheckFailed(
            f"{engine.num_leaked_blocks} blocks are still held after the last turn."
        )
    if not engine.scheduler.reset_prefix_cache():
        raise CheckFailed("the prefix cache does not reset after the last turn.")
    problems = engine.events.lifecycle_problems()
    problems += [
        f"checkpoint {i} was neither published nor discarded"
        for i in engine.events.open_checkpoints()
    ]
    if problems:
        raise CheckFailed(f"{problems[0]}.")
