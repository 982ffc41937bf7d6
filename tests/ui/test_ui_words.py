"""Every code has words; every text is shown as it is, whatever it holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ui import formatting, reasons
from vllm_fork import events

NO_CHECKPOINT = (
    *events.DISCARD_REASONS,
    "below_block",
    "never_admitted",
    "resumable",
    "disabled",
)


@pytest.mark.parametrize("code", NO_CHECKPOINT)
def test_each_no_checkpoint_reason_has_words(code):
    reason = reasons.no_checkpoint(code)
    assert reason is reasons.NO_CHECKPOINT[code]
    assert reason.sentence.endswith(".")
    assert len(reason.sentence) > 30


def test_the_page_knows_no_reason_that_the_schema_does_not():
    assert set(reasons.NO_CHECKPOINT) == set(NO_CHECKPOINT)


def test_each_other_code_of_the_schema_has_words():
    assert set(reasons.HIT_LIMIT) == set(events.HIT_LIMITS)
    assert set(reasons.KIND) == set(events.SOURCE_KINDS)
    assert set(reasons.EVICTION) == set(events.EVICTION_REASONS)


def test_a_hit_that_ends_with_the_prompt_does_not_claim_reuse():
    """A short prompt, of which nothing can be reused, ends there as well."""
    assert "reused" not in reasons.HIT_LIMIT["prompt_end"].short


@pytest.mark.parametrize("code", reasons.UNSUPPORTED)
def test_unsupported_says_what_and_why(code):
    reason = reasons.no_checkpoint(code)
    assert reason.short.startswith("unsupported: ")
    assert len(reason.sentence) > 40


def test_a_code_from_the_future_is_shown_not_hidden():
    assert "warp_core" in reasons.no_checkpoint("warp_core").sentence
    assert "warp drive" in reasons.no_checkpoint("unsupported:warp_drive").short
    assert "warp" in reasons.hit_limit("warp").sentence


@pytest.mark.parametrize("status", ["open", "finished", "engine_lost"])
@pytest.mark.parametrize("incomplete", [True, False])
@pytest.mark.parametrize("reason", [None, "length"])
@pytest.mark.parametrize("boundary", [None, 0, 1056])
def test_no_request_is_without_a_reason(status, incomplete, reason, boundary):
    outcome = reasons.outcome(status, boundary, reason, incomplete)
    assert outcome.short
    assert outcome.sentence


@given(st.text(max_size=400))
def test_visible_hides_nothing_and_turns_nothing(text):
    """No control, line break or direction mark is left; ordinary text is untouched."""
    shown = formatting.visible(text)
    assert all(c.isprintable() or c in " \u00a0\u00ad" or ord(c) > 127 for c in shown)
    assert not set(shown) & set("\u202e\u2066\u200f\n\r\x00\x1b")
    if text.isascii() and text.isprintable() and len(text) <= 300:
        assert shown == text


@given(
    st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=80)
)
def test_markdown_leaves_no_active_character(text):
    """Each ASCII punctuation is escaped: undoing the escapes gives the text back."""
    escaped = formatting.markdown(text)
    undone, index = "", 0
    while index < len(escaped):
        if escaped[index] == "\\":
            index += 1
        else:
            assert escaped[index] not in "*_[]()<>#`~$:!|@/&"
        undone += escaped[index]
        index += 1
    assert undone == text


def test_plotly_text_is_no_markup():
    hostile = '<a href="javascript:alert(1)">x</a>'
    assert "<" not in formatting.plotly(hostile)


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (None, "—"),
        (850_000, "850 µs"),
        (12_300_000, "12.3 ms"),
        (4_210_000_000, "4.21 s"),
        (200_000_000_000, "3 min 20 s"),
        (7_500_000_000_000, "2 h 5 min"),
        (273_600_000_000_000, "3 d 4 h"),
        (-2_000_000_000, "-2.00 s"),
    ],
)
def test_duration(ns, shown):
    assert formatting.duration(ns) == shown


def test_counts():
    assert formatting.count(None) == "—"
    assert formatting.count(12345) == "12,345"
    assert formatting.compact(999) == "999"
    assert formatting.compact(12_345) == "12.3k"
    assert formatting.compact(4_600_000) == "4.6M"
    assert formatting.percent(1, 0) == "—"
    assert formatting.percent(23056, 36254) == "63.6%"
