"""Writes attributes into OTLP messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def set_attributes(target: Any, attributes: Mapping[str, Any]) -> None:
    """Append ``attributes`` to the repeated ``KeyValue`` field ``target``.

    Values are strings, booleans, integers, floats, or sequences of strings; None is
    left out: an attribute that is absent says "not known".
    """
    for key, value in attributes.items():
        if value is None:
            continue
        item = target.add()
        item.key = key
        kind = type(value)
        if kind is int:
            item.value.int_value = value
        elif kind is str:
            item.value.string_value = value
        elif kind is bool:
            item.value.bool_value = value
        elif kind is float:
            item.value.double_value = value
        else:
            values = item.value.array_value.values
            for element in value:
                values.add().string_value = element
