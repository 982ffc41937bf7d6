"""The alerts of docs/operations.md ask for metrics and labels that /metrics has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from event_consumer.export_queue import ExportStats
from event_consumer.metrics import CheckpointMetrics, StreamHealth
from event_consumer.records import StreamRecord
from vllm_fork.events import (
    CheckpointDiscarded,
    CheckpointEvicted,
    CheckpointPinned,
    CheckpointPublished,
    EventBatch,
    PrefixReused,
)

TEXT = (Path(__file__).parents[2] / "docs/operations.md").read_text()
BLOCKS = re.findall(r"(?ms)^```yaml\n(.*?)^```", TEXT)
RULES = [
    rule
    for group in yaml.safe_load(next(b for b in BLOCKS if b.startswith("groups:")))[
        "groups"
    ]
    for rule in group["rules"]
]
NOT_OURS = {"up"}
TIMES = {"time_unix_ns": 1, "monotonic_ns": 1, "request_id": "r"}
CHECKPOINT = {**TIMES, "checkpoint_id": 1, "boundary": 384, "boundary_kind": "copy"}
EVENTS = [
    CheckpointPinned(**CHECKPOINT, num_blocks=1),
    CheckpointPublished(**CHECKPOINT),
    CheckpointDiscarded(**CHECKPOINT, reason="memory_pressure"),
    CheckpointEvicted(**CHECKPOINT, reason="lru", age_s=1.0),
    PrefixReused(
        **TIMES, num_prompt_tokens=9, num_cached_tokens=4, shared_prefix_boundary=8
    ),
]


@pytest.fixture(scope="module")
def scraped() -> dict[str, set[str]]:
    """The label names of each sample that a scrape can have."""
    metrics = CheckpointMetrics(
        streams=lambda: [StreamHealth(StreamRecord(endpoint="tcp://e:1", lag_ns=1), 0)],
        exports=lambda: [ExportStats("traces", exported=1, dropped={"queue_full": 1})],
    )
    batch = EventBatch(ts=0.0, events=[], engine_id="e", label="on", model_name="m")
    metrics.apply(batch, EVENTS)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.prometheus()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.get("alert") or r["record"])
def test_rule_asks_for_what_is_there(rule, scraped):
    expression = rule["expr"]
    recorded = {r["record"] for r in RULES if "record" in r}
    for name in recorded:
        expression = expression.replace(name, "")
    asked = set(re.findall(r"\b((?:vllm|otel)_[a-z_]+)(?=[{\[ )]|$)", expression))
    metrics = asked & scraped.keys()
    labels = set().union(*(scraped[name] for name in metrics))
    grouped = set(re.findall(r"(?:by|on) \(([^)]*)\)", expression))
    by = {label.strip() for group in grouped for label in group.split(",")}
    selected = set(re.findall(r"(\w+)(?:=~?|!=)\"", expression)) - {"job"}
    assert asked - by - metrics == set(), "no such metric"
    assert by | selected <= labels
    assert metrics or NOT_OURS & set(re.findall(r"\w+", expression)) or recorded


def test_every_block_is_yaml():
    for block in BLOCKS:
        assert list(yaml.safe_load_all(block))
