"""What must hold after the dialog was played: each check is one line of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from event_consumer import names
from event_consumer.otlp_receiver import ReceivedSpan
from vllm_fork.demo.dialog import TurnResult
from vllm_fork.demo.table import hit_rate


@dataclass(frozen=True)
class Check:
    """A claim, and what speaks against it: it holds where nothing does."""

    claim: str
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"FAILED  {self.claim}: {self.problem}"
        return f"    ok  {self.claim}"


def more_is_reused(off: Sequence[TurnResult], on: Sequence[TurnResult]) -> Check:
    """The second arm's hit rate is above the first's."""
    rates = f"{hit_rate(off):.1%} off, {hit_rate(on):.1%} on"
    return Check(
        f"retention raises the hit rate ({rates})",
        "" if hit_rate(on) > hit_rate(off) else "it does not",
    )


def same_reuse(
    arm: str, turns: Sequence[TurnResult], where: str, told: Mapping[str, int | None]
) -> Check:
    """``told`` (by request id) equals each turn's ``cached_tokens``."""
    seen = [turn.cached for turn in turns]
    other = [told.get(turn.request_id) for turn in turns]
    return Check(
        f"{arm}: the cached tokens of each turn, {_list(seen)}, are those {where}",
        "" if seen == other else f"there they are {_list(other)}",
    )


def turns_are_linked(
    turns: Sequence[TurnResult],
    stored: Mapping[str, Mapping[str, Any]],
    spans: Mapping[str, ReceivedSpan],
    checkpoints: Sequence[ReceivedSpan],
) -> Check:
    """Each turn's span links to the span that published what the turn resumed from,
    and that is a checkpoint of the turn before."""
    claim = (
        "on: the span of each turn links to the span that published the "
        "checkpoint of the turn before"
    )
    published = {
        span.span_id: span
        for span in checkpoints
        if span.attributes.get(names.STAGE) == "published"
    }
    for index, (before, turn) in enumerate(pairwise(turns), 1):
        span, earlier = spans.get(turn.request_id), spans.get(before.request_id)
        if span is None or earlier is None:
            return Check(claim, f"turn {index} or the one before has no span")
        linked = [published[k.span_id] for k in span.links if k.span_id in published]
        if not any(target.parent_span_id == earlier.span_id for target in linked):
            source = stored.get(turn.request_id, {}).get("source_external_request_id")
            return Check(
                claim,
                f"turn {index} does not (its {len(span.links)} links lead elsewhere; "
                f"the store says it resumed from {source})",
            )
    return Check(claim)


def lives_are_whole(stages: Mapping[tuple[str, int], Sequence[str]]) -> Check:
    """Every checkpoint was pinned once and ended once, published or discarded."""
    claim = (
        f"each of {len(stages)} checkpoints was pinned once, "
        "and then published or discarded once"
    )
    if not stages:
        return Check(claim, "there are none")
    for (_, checkpoint), told in stages.items():
        ends = told.count(names.PUBLISHED) + told.count(names.DISCARDED)
        if told.count(names.PINNED) != 1 or ends != 1:
            return Check(claim, f"checkpoint {checkpoint} was {', '.join(told)}")
    return Check(claim)


def reason_is_given(
    turns: Sequence[TurnResult], stored: Mapping[str, Mapping[str, Any]]
) -> Check:
    """With retention off each request says so."""
    reasons = {
        str(stored.get(turn.request_id, {}).get("no_checkpoint_reason"))
        for turn in turns
    }
    return Check(
        "off: each request says why it retained nothing (disabled)",
        "" if reasons == {"disabled"} else f"it says {_list(sorted(reasons))}",
    )


def _list(values: Sequence[Any]) -> str:
    return " ".join(map(str, values))
