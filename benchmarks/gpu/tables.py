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
    return [turns, *_follow_ups(results)]


def _follow_ups(results: list[dict[str, Any]]) -> list[str]:
    follow_ups = _table(
        ["arm", "lengths", "new tokens", "cached", "follow-up (s)", "range",
         "new tokens alone (s)", "range", "ratio", "split alike (s)", "range", "ratio",
         "steps: follow-up", "alone", "split alike"],
        [
            [
                r["arm"], r["lengths"], f["new_tokens"],
                " ".join(map(str, f["cached"])),
                f"{f['ttft_s']:.4f}", _range(f["ttft_range_s"]),
                f"{f['new_alone_s']:.4f}", _range(f["new_alone_range_s"]), f["ratio"],
                *(
                    [f"{f['alike_s']:.4f}", _range(f["alike_range_s"]),
                     f["alike_ratio"]]
                    + [" + ".join(map(str, steps)) for steps in _steps(f)]
                    if "alike_s" in f
                    else [""] * 6
                ),
            ]
            for r in results
            for f in r.get("follow_ups", ())
        ],
    )  # fmt: skip
    return [follow_ups]


def _range(values: Sequence[float]) -> str:
    return "{:.4f}-{:.4f}".format(*values)


def _steps(follow_up: dict[str, Any]) -> list[list[int]]:
    return [follow_up["steps"][kind] for kind in ("follow_up", "alone", "alike")]


def _throughput(results: list[dict[str, Any]]) -> list[str]:
    rows = [row for result in results for row in result.get("rows", [result])]
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
                    *(
                        [
                            " ".join(
                                f"{k} {v}" for k, v in r["whole_tokens_per_s"].items()
                            ),
                            r["pins"]["most_blocks"],
                            r["pins"]["most_blocks_held_by_pins_alone"],
                        ]
                        if "pins" in r
                        else [""] * 3
                    ),
                ]
                for r in rows
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
            ["arm", "blocks", "preemptions", "hits (inside a unit)", "in one step",
             *sides,
             "nearer to a wrong state"],
            [
                [
                    r["arm"], r["available_blocks"], r["preemptions"],
                    f"{r['hits']} ({r['hits_inside_a_unit']})",
                    r.get("in_one_step", ""),
                    *(spread(r, side) for side in sides),
                    f"{r['nearer_to_wrong']} of {r['compared_with_wrong']}"
                    if "nearer_to_wrong" in r
                    else "",
                ]
                for r in results
            ],
        )
    ]  # fmt: skip


def _storm(results: list[dict[str, Any]]) -> list[str]:
    def more(result: dict[str, Any], *names: str) -> list[object]:
        return [result.get(name, "") for name in names]

    def ends(result: dict[str, Any]) -> str:
        return " ".join(f"{k} {v}" for k, v in result["finished"].items())

    return [
        _table(
            ["arm", "blocks", "ended", "preemptions", "answers", "hits",
             "inside a block", "off the hash grid", "most first tokens after a hit, "
             "one step", "cached", "prompt"],
            [
                [
                    r["arm"], r["available_blocks"], ends(r), r["preemptions"],
                    *more(r, "answers", "hits", "hits_inside_a_block",
                          "hits_inside_a_unit", "most_hits_at_once", "cached",
                          "prompt"),
                ]
                for r in results
            ],
        ),
        *_checked(results),
    ]  # fmt: skip


def _as_they_are(results: list[dict[str, Any]]) -> list[str]:
    return [
        _table(list(rows[0]), [list(row.values()) for row in rows])
        for rows in (result["rows"] for result in results)
    ]


TABLES = {
    "calibrate": _as_they_are,
    "copy_cost": _as_they_are,
    "dialog": _dialog,
    "throughput": _throughput,
    "uninterrupted": _uninterrupted,
    "concurrent": _checked,
    "steps": _as_they_are,
    "one_step": _as_they_are,
    "follow_ups": _follow_ups,
    "workers": _as_they_are,
    "storm": _storm,
}
