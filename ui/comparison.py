"""The reference's A/B table (vLLM PR 50551) from the tokens of two arms, by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ui import formatting


class TurnPair(NamedTuple):
    """One row: ``a`` or ``b`` is None where that arm has no such turn."""

    turn: int
    a: dict[str, Any] | None
    b: dict[str, Any] | None


def pair_turns(
    a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]
) -> list[TurnPair]:
    """The rows of ``Queries.by_turn`` of two arms, side by side."""
    by_a = {row["turn"]: row for row in a}
    by_b = {row["turn"]: row for row in b}
    turns = sorted(by_a.keys() | by_b.keys())
    return [TurnPair(turn, by_a.get(turn), by_b.get(turn)) for turn in turns]


def total(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The sums over the turns of one arm."""
    names = ("num_requests", "cached", "prompt", "completion")
    return {name: sum(row[name] for row in rows) for name in names}


def triple(row: dict[str, Any] | None) -> str:
    """``cached / prompt / completion``, as the reference prints it."""
    if row is None:
        return "—"
    return f"{row['cached']} / {row['prompt']} / {row['completion']}"


def as_text(
    name_a: str,
    name_b: str,
    a: Sequence[dict[str, Any]],
    b: Sequence[dict[str, Any]],
) -> str:
    """The table as the reference has it: one line a turn, tabs between columns."""
    what = "(cached / prompt / completion)"
    lines = [f"Turn\t{name_a} {what}\t{name_b} {what}"]
    lines += [
        f"{pair.turn}\t{triple(pair.a)}\t{triple(pair.b)}" for pair in pair_turns(a, b)
    ]
    total_a, total_b = total(a), total(b)
    lines.append(f"Total\t{triple(total_a)}\t{triple(total_b)}")
    lines.append(f"Hit rate\t{hit_rate(total_a)}\t{hit_rate(total_b)}")
    return "\n".join(lines)


def hit_rate(row: dict[str, Any] | None) -> str:
    """Cached of prompt tokens, as ``94.7%``."""
    if row is None:
        return "—"
    return formatting.percent(row["cached"], row["prompt"])
