"""The figures: what is drawn where, with a shape beside each colour."""

from __future__ import annotations

import itertools
from datetime import datetime

import pytest
import seeded_store

from ui import comparison, palette
from ui.charts import comparison as comparison_chart
from ui.charts import overview, token_axis, waterfall
from ui.charts import stage_timeline as timeline

NOW = 1_800_000_000 * seeded_store.SECOND
ENGINE = seeded_store.engine_row(1, "prod", NOW)


def request(**more):
    row = seeded_store.request_row(
        ENGINE,
        "chatcmpl-1",
        NOW,
        arrival_ns=NOW - 10 * seeded_store.SECOND,
        admitted_ns=NOW - 9 * seeded_store.SECOND,
        num_prompt_tokens=3634,
        num_cached_tokens=3168,
        num_output_tokens=4080,
    )
    return row | more


def checkpoint(stage, boundary, **more):
    rows = seeded_store.Rows()
    return seeded_store.checkpoint_row(
        rows, request(), boundary, stage=stage, pinned_ns=NOW - 10**9, **more
    )


def test_segments_are_half_open_and_meet():
    parts = token_axis.segments(request())
    assert parts == [
        ("reused", 0, 3168),
        ("prefilled", 3168, 3634),
        ("decoded", 3634, 7714),
    ]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_cached_tokens": 0}, ["prefilled", "decoded"]),
        ({"num_cached_tokens": None, "num_output_tokens": None}, ["prefilled"]),
        ({"num_prompt_tokens": None, "num_output_tokens": None}, []),
        ({"num_output_tokens": 0}, ["reused", "prefilled"]),
    ],
)
def test_segments_of_what_is_not_known_are_left_out(changes, names):
    assert [name for name, _, _ in token_axis.segments(request(**changes))] == names


def test_every_boundary_is_marked_by_its_stage():
    stages = list(palette.STAGES)
    checkpoints = [checkpoint(stage, 1056 * (i + 4)) for i, stage in enumerate(stages)]
    figure = token_axis.token_axis(request(), checkpoints)
    marks = {t.name: t for t in figure.data if t.type == "scatter"}
    assert set(marks) == set(stages)
    for stage, boundary in zip(
        stages, (c["boundary"] for c in checkpoints), strict=True
    ):
        assert list(marks[stage].x) == [boundary]
        assert marks[stage].marker.symbol == palette.stage(stage).symbol
    bars = {t.name: t for t in figure.data if t.type == "bar"}
    assert list(bars["prefilled"].base) == [3168]
    assert list(bars["prefilled"].x) == [466]
    assert bars["prefilled"].marker.pattern.shape != bars["reused"].marker.pattern.shape


def test_the_axis_in_words():
    words = token_axis.alternative(request(), [checkpoint("published", 7392)])
    assert "3,168 tokens reused" in words
    assert "published at 7,392" in words


def test_stage_symbols_and_shapes_differ():
    """Nobody has to tell stages apart by colour."""
    for one, two in itertools.combinations(palette.STAGES.values(), 2):
        assert one.symbol != two.symbol
        assert one.shape != two.shape


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ground", ["#ffffff", "#11161c"])
@pytest.mark.parametrize(
    "colour",
    [
        palette.REUSED,
        palette.PREFILLED,
        palette.DECODED,
        palette.BAD,
        palette.SPECIAL,
        palette.STAGES["promoted"].colour,
    ],
)
def test_contrast_on_both_grounds(colour, ground):
    """WCAG 1.4.11: at least 3:1 for what carries meaning."""
    light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3.0


def test_stage_times_come_in_order():
    row = checkpoint(
        "evicted", 7392, promoted_ns=NOW, published_ns=NOW + 1, evicted_ns=NOW + 2
    )
    names = [name for name, _ in timeline.stage_times(row)]
    assert names == ["pinned", "promoted", "published", "evicted"]


def test_a_late_eviction_does_not_squeeze_the_timeline():
    row = checkpoint(
        "evicted",
        7392,
        promoted_ns=NOW,
        published_ns=NOW,
        evicted_ns=NOW + 3600 * seeded_store.SECOND,
    )
    figure = timeline.stage_timeline(request(), [row], NOW, str)
    assert max(max(t.x) for t in figure.data if t.type == "scatter") < 12


def test_the_waterfall_links_a_state_to_the_turn_that_resumed():
    first = request(
        request_id="a",
        num_cached_tokens=0,
        num_prompt_tokens=61,
        retained_boundary=3168,
    )
    second = request(request_id="b", source_request_id="a", source_boundary=3168)
    figure = waterfall.waterfall([first, second])
    (link,) = [t for t in figure.data if t.name == "resumed"]
    assert list(link.x) == [3168, 3168, None]
    assert list(link.y) == ["turn 0", "turn 1", None]


def test_hostile_names_are_text_in_figures():
    pairs = comparison.pair_turns([{"turn": 0, "cached": 0, "prompt": 9}], [])
    figure = comparison_chart.computed_by_turn(pairs, "<a href='x'>a</a>", "b")
    assert "<a" not in figure.data[0].name


def test_outcomes_fold_the_rare_ones():
    counted = [(f"reason_{i}", 100 - i) for i in range(15)]
    bar = overview.outcomes(counted).data[0]
    assert len(bar.y) == overview.MAX_OUTCOMES + 1
    assert sum(bar.x) == sum(number for _, number in counted)


def test_the_table_as_the_reference_prints_it():
    a, b = (
        [
            {
                "turn": i,
                "num_requests": 1,
                "cached": c,
                "prompt": p,
                "completion": o,
            }
            for i, (c, p, o) in enumerate(seeded_store.REFERENCE[arm])
        ]
        for arm in ("arm-off", "arm-on")
    )
    lines = comparison.as_text("Retain=0", "Retain=1", a, b).splitlines()
    assert lines == [
        "Turn\tRetain=0 (cached / prompt / completion)"
        "\tRetain=1 (cached / prompt / completion)",
        "0\t0 / 61 / 3613\t0 / 61 / 3518",
        "1\t48 / 3729 / 4374\t3168 / 3634 / 4080",
        "2\t3728 / 8151 / 2950\t7392 / 7763 / 3071",
        "3\t8144 / 11145 / 1977\t10560 / 10878 / 1290",
        "4\t11136 / 13168 / 8126\t11616 / 12214 / 2935",
        "Total\t23056 / 36254 / 21040\t32736 / 34550 / 14894",
        "Hit rate\t63.6%\t94.7%",
    ]


def test_arms_of_unequal_length():
    a = [{"turn": 0, "num_requests": 1, "cached": 0, "prompt": 9, "completion": 1}]
    text = comparison.as_text("A", "B", a, [])
    assert "0\t0 / 9 / 1\t—" in text


def test_a_long_name_of_an_arm_leaves_room_for_the_other():
    """What tells two of them apart may be at either end."""
    pair = comparison.TurnPair(0, {"prompt": 10, "cached": 5}, None)
    names = [f"eu-{'x' * 200}-{number}" for number in (1, 2)]
    figure = comparison_chart.computed_by_turn([pair], *names)
    shown = [trace.name for trace in figure.data]
    assert [name[:4] + name[-3:] for name in shown] == ["eu-xx-1", "eu-xx-2"]
    assert max(map(len, shown)) <= comparison_chart.MAX_NAME + 1


def test_a_single_hit_rate_is_seen():
    """Of one point there is no line to draw."""
    times = [datetime(2026, 1, 1, second=second) for second in range(3)]
    for prompt, mode in (([0, 10, 0], "markers"), ([10, 10, 0], "lines")):
        figure = overview.tokens_over_time(times, prompt, [0, 5, 0])
        assert figure.data[0].mode == mode
