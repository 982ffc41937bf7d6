"""Each page runs over a full store, without an exception."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "page",
    ["overview", "requests", "request", "conversations", "compare", "health"],
)
def test_page_runs(open_page, seeded_url, page):
    at = open_page(seeded_url, page)
    assert not at.exception
    assert at.title


def test_request_by_external_id(open_page, seeded_url):
    at = open_page(seeded_url, "request", request="chatcmpl-arm-on-turn-1")
    assert not at.exception
    figures = {m.label: m.value for m in at.metric}
    assert figures["Reused"] == "3,168"
    assert figures["Retained"] == "7,392"
