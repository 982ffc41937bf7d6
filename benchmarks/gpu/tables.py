"""Results as short tables, for a terminal and for RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def describe(results: Iterable[dict[str, Any]]) -> str:
    """Markdown tables of the results of any runs, experiment by experiment."""
    parts = []
    by_experiment: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if "experiment" not in result:  # engine.json
            continue
        by_experiment.setdefault(result["experiment"], []).append(result)
    for experiment, found in by_experiment.items():
        failed = [r for r in found if "error" in r]
        done = [r for r in found if "error" not in r]
        parts += [f"{experiment}: {r['error']}" for r in failed]
        if done and experiment in TABLES:
            parts += TABLES[experiment](done)
    return "\n\n".join(parts)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _dialog(results: list[dict[str, Any]]) -> list[str]:
    turns = _table(
        ["arm", "lengths", "cached, by turn", "cached / prompt", "hit rate",
         "time to first token (s)", "decode (ms a token)", "as the reference"],
        [
            [
                r["arm"],
                r["lengths"],
                " ".join(str(t["cached"]) for t in r["turns"]),
                f"{r['cached']:,} / {r['prompt']:,}",
                f"{100 * r['hit_rate']:.2f}%",
                " ".join(f"{t['ttft_s']:.3f}" for t in r["turns"]),
                " ".join(f"{t['decode_ms']:.2f}" for t in r["turns"]),
                {True: "yes", False: "NO", None: ""}[r["as_reference"]],
            ]
            for r in results
        ],
    )  # fmt: skip
    follow_ups = _table(
        ["arm", "lengths", "new tokens", "cached", "follow-up (s)", "range",
         "new tokens alone (s)", "range", "ratio"],
        [
            [
                r["arm"], r["lengths"], f["new_tokens"],
                " ".join(map(str, f["cached"])),
                f"{f['ttft_s']:.4f}", "{:.4f}-{:.4f}".format(*f["ttft_range_s"]),
                f"{f['new_alone_s']:.4f}",
                "{:.4f}-{:.4f}".format(*f["new_alone_range_s"]), f["ratio"],
            ]
            for r in results
            for f in r.get("follow_ups", ())
        ],
    )  # fmt: skip
    return [turns, follow_ups]


def _throughput(results: list[dict[str, Any]]) -> list[str]:
    return [
        _table(
            ["running", "arm", "step off (ms)", "step on (ms)", "on/off, tokens/s",
             "range", "off/off", "whole run: tokens/s", "most pinned blocks",
             "held by pins alone"],
            [
                [
                    r["running"], r["arm"], r["step_ms"]["off"], r["step_ms"]["on"],
                    r["ratio"], "{}-{}".format(*r["ratio_range"]),
                    " ".join(map(str, r["off_against_off"])),
                    " ".join(f"{k} {v}" for k, v in r["whole_tokens_per_s"].items()),
                    r["pins"]["most_blocks"],
                    r["pins"]["most_blocks_held_by_pins_alone"],
                ]
                for r in results
            ],
        )
    ]  # fmt: skip


def _uninterrupted(results: list[dict[str, Any]]) -> list[str]:
    return [
        _table(
            ["arm", "dialogs", "tokens equal", "log-probabilities equal",
             "largest difference", "decode against prefill: median", "largest"],
            [
                [
                    r["arm"], r["dialogs"], r["equal"], r["exact_logprobs"],
                    f"{r['max_dlogprob']:.4f}", f"{r['floor_median']:.4f}",
                    f"{r['floor_max']:.4f}",
                ]
                for r in results
            ],
        )
    ]  # fmt: skip


def _checked(results: list[dict[str, Any]]) -> list[str]:
    sides = ("hit", "missed", "other state", "older state", "one other token")

    def spread(result: dict[str, Any], side: str) -> str:
        found = result["correlation"].get(side)
        return "" if found is None else "{min} {median} {max}".format(**found)

    return [
        _table(
            ["arm", "blocks", "preemptions", "hits (inside a unit)", *sides],
            [
                [
                    r["arm"], r["available_blocks"], r["preemptions"],
                    f"{r['hits']} ({r['hits_inside_a_unit']})",
                    *(spread(r, side) for side in sides),
                ]
                for r in results
            ],
        )
    ]  # fmt: skip


def _calibrate(results: list[dict[str, Any]]) -> list[str]:
    return [
        _table(list(rows[0]), [list(row.values()) for row in rows])
        for rows in (result["rows"] for result in results)
    ]


TABLES = {
    "calibrate": _calibrate,
    "dialog": _dialog,
    "throughput": _throughput,
    "uninterrupted": _uninterrupted,
    "concurrent": _checked,
    "storm": _checked,
}
