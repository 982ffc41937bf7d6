"""The A/B table, in the shape of the reference's (vLLM PR 50551)."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_fork.demo.dialog import TurnResult


def hit_rate(turns: Sequence[TurnResult]) -> float:
    """Cached prompt tokens over prompt tokens, as a fraction."""
    return sum(t.cached for t in turns) / sum(t.prompt for t in turns)


def ab_table(off: Sequence[TurnResult], on: Sequence[TurnResult]) -> str:
    """Cached / prompt / completion tokens of each turn, both arms side by side."""
    columns = [
        ["Turn", *map(str, range(len(off))), "Total", "Hit rate"],
        _arm("Retain=0 (cached / prompt / completion)", off),
        _arm("Retain=1 (cached / prompt / completion)", on),
    ]
    for column in columns:
        width = max(map(len, column))
        column.insert(1, "-" * width)
        column[:] = [cell.ljust(width) for cell in column]
    rows = zip(*columns, strict=True)
    return "\n".join("  ".join(row).rstrip() for row in rows)


def _arm(title: str, turns: Sequence[TurnResult]) -> list[str]:
    rows = [(t.cached, t.prompt, t.completion) for t in turns]
    totals = (sum(counts) for counts in zip(*rows, strict=True))
    cells = [" / ".join(map(str, row)) for row in [*rows, tuple(totals)]]
    return [title, *cells, f"{hit_rate(turns):.1%}"]
