"""docs/traces.md names everything that is exported, and nothing else is exported."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import otel_metrics
from opentelemetry.semconv.attributes import error_attributes

from event_consumer import names

DOCUMENT = Path(__file__).parents[2] / "docs" / "traces.md"
REFERENCE = DOCUMENT.read_text().split("## Attributes")[1]

NAMES = {
    key: value
    for key, value in vars(names).items()
    if key.isupper() and isinstance(value, str) and "." in value
}
NOT_EXPORTED = {"SCOPE"}
LINE = re.compile(r"`((?:vllm|gen_ai|otel|error|kv_cache)\.[a-z_.]+[a-z])`")


@pytest.mark.parametrize("key", sorted(NAMES.keys() - NOT_EXPORTED))
def test_every_name_is_in_the_reference(key):
    assert f"`{NAMES[key]}`" in REFERENCE


def test_the_reference_names_nothing_that_does_not_exist():
    replaced = {"gen_ai.usage.cache_creation.input_tokens"}
    assert set(LINE.findall(DOCUMENT.read_text())) - set(NAMES.values()) <= replaced


def test_names_are_unique_but_for_those_shared_on_purpose():
    values = list(NAMES.values())
    assert len(values) == len(set(values))


def test_our_own_names_are_in_our_own_namespaces():
    spans = {names.REQUEST_SPAN, names.CHECKPOINT_SPAN, names.SCOPE}
    foreign = [
        value
        for value in set(NAMES.values()) - spans
        if not value.startswith(("vllm.checkpoint.", "vllm.prefix_cache."))
    ]
    assert all(value.startswith(("gen_ai.", "otel.", "error.")) for value in foreign)


def test_names_of_the_conventions_are_the_conventions():
    """As far as the released Python package has them: ``cache_write`` replaced
    ``cache_creation`` after it, and ``gen_ai.request.id`` is vLLM's own."""
    known = {v for k, v in vars(gen_ai_attributes).items() if k.isupper()}
    ours = {v for v in NAMES.values() if v.startswith("gen_ai.")}
    assert ours - known == {names.CACHE_WRITE_TOKENS, names.REQUEST_ID}
    assert names.TEXT_COMPLETION in {
        each.value for each in gen_ai_attributes.GenAiOperationNameValues
    }
    assert names.ERROR_TYPE == error_attributes.ERROR_TYPE
    metrics = {v for k, v in vars(otel_metrics).items() if k.isupper()}
    assert {v for v in NAMES.values() if v.startswith("otel.sdk.")} <= metrics


def test_vllm_joins_by_the_same_attribute():
    """Read, not imported: that takes many seconds."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(vllm.origin).parent / "tracing" / "utils.py").read_text()
    assert f'GEN_AI_REQUEST_ID = "{names.REQUEST_ID}"' in source
