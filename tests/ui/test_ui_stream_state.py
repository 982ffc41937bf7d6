"""What a stream's row means, and what the banner says."""

from __future__ import annotations

import pytest
import seeded_store

from ui import stream_state

NOW = 1_800_000_000 * seeded_store.SECOND


def stream(**more):
    engine = seeded_store.engine_row(1, more.pop("label", "prod"), NOW)
    row = seeded_store.stream_row(engine, NOW) | {
        "label": engine["label"],
        "engine_status": "running",
    }
    return row | more


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, "live"),
        ({"state": "gapped"}, "gapped"),
        ({"state": "replaying"}, "replaying"),
        ({"state": "disconnected"}, "disconnected"),
        ({"state": "disconnected", "engine_status": "stopped"}, "stopped"),
        ({"engine_status": "stopped"}, "stopped"),
        ({"updated_ns": NOW - 11 * seeded_store.SECOND}, "silent"),
        ({"updated_ns": NOW - 9 * seeded_store.SECOND}, "live"),
        ({"state": "gapped", "updated_ns": 1}, "gapped"),
        ({"num_lost": 3}, "lossy"),
        ({"num_dropped": 3}, "lossy"),
        ({"engine_id": None, "engine_status": None, "label": None}, "live"),
        ({"updated_ns": None, "last_batch_ns": None}, "live"),
    ],
)
def test_judge(changes, code):
    state = stream_state.judge(stream(**changes), NOW)
    assert state.code == code
    assert state.sentence.endswith(".")


def test_a_quiet_engine_is_not_silent():
    """No request for an hour, but the consumer still writes: nothing to say."""
    quiet = stream(last_batch_ns=NOW - 3600 * seeded_store.SECOND)
    assert stream_state.banner([quiet], NOW) is None


def test_no_banner_when_all_is_well():
    assert stream_state.banner([], NOW) is None
    assert stream_state.banner([stream(), stream(engine_status="stopped")], NOW) is None


def test_the_banner_names_streams_and_losses():
    banner = stream_state.banner(
        [
            stream(label="a", state="gapped"),
            stream(label="b", updated_ns=1),
            stream(label="c", num_lost=1, num_dropped=1200),
        ],
        NOW,
    )
    assert banner is not None
    assert banner.level == "error"
    assert "**a**: gapped" in banner.text
    assert "**b**: silent" in banner.text
    assert "1 batch and 1,200 events lost for good" in banner.text


def test_loss_alone_warns():
    banner = stream_state.banner([stream(num_lost=2)], NOW)
    assert banner is not None
    assert banner.level == "warning"


def test_a_hostile_label_is_text():
    banner = stream_state.banner(
        [stream(label="![x](http://evil/x.png)<img src=x>", state="gapped")], NOW
    )
    assert banner is not None
    assert "![" not in banner.text
    assert "](" not in banner.text
    assert " <img" not in banner.text.replace("\\<", "")


def test_many_streams_make_one_line():
    streams = [stream(label=f"e{i}", state="gapped") for i in range(30)]
    banner = stream_state.banner(streams, NOW)
    assert banner is not None
    assert "and 26 more" in banner.text
