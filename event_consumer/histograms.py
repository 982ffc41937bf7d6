"""Histograms with explicit buckets, cheap enough for every event.

The SDK's histogram takes some ten microseconds a value and reader, most of them for
attributes that are the same each time; here a value costs a lookup and a bisection.
What a reader gets is the SDK's own data: :class:`HistogramExporter` adds it to every
push, :class:`HistogramCollector` to every Prometheus scrape. Always cumulative.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str | bool | int], ...]


class _Buckets:
    def __init__(self, num_bounds: int) -> None:
        self.counts = [0] * (num_bounds + 1)
        self.sum: float = 0


class BucketHistogram:
    """One instrument. Bucket ``i`` counts values in ``(bounds[i-1], bounds[i]]``, the
    last one those above all bounds. :meth:`add` is for one thread."""

    def __init__(
        self, name: str, unit: str, description: str, bounds: Sequence[float]
    ) -> None:
        self.name = name
        self.unit = unit
        self.description = description
        self.bounds = tuple(bounds)
        self._points: dict[Labels, _Buckets] = {}
        self._start_ns = time.time_ns()

    def add(self, value: float, labels: Labels) -> None:
        buckets = self._points.get(labels)
        if buckets is None:
            buckets = self._points[labels] = _Buckets(len(self.bounds))
        buckets.counts[bisect_left(self.bounds, value)] += 1
        buckets.sum += value

    def points(self) -> Iterator[tuple[Labels, list[int], float]]:
        """Labels, bucket counts and sum of each point now."""
        for labels, buckets in list(self._points.items()):
            yield labels, list(buckets.counts), buckets.sum

    def metric(self) -> Metric | None:
        """As the SDK would have collected it; None before the first value."""
        now_ns = time.time_ns()
        points = [
            HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=self._start_ns,
                time_unix_nano=now_ns,
                count=sum(counts),
                sum=total,
                bucket_counts=counts,
                explicit_bounds=self.bounds,
                # Not kept: a minimum of all times says nothing about now.
                min=None,  # type: ignore[arg-type]
                max=None,  # type: ignore[arg-type]
            )
            for labels, counts, total in self.points()
        ]
        if not points:
            return None
        data = Histogram(points, AggregationTemporality.CUMULATIVE)
        return Metric(self.name, self.description, self.unit, data)


class HistogramExporter(MetricExporter):
    """``inner``, with ``histograms`` added to all that it exports."""

    def __init__(
        self, inner: MetricExporter, histograms: Sequence[BucketHistogram]
    ) -> None:
        super().__init__(inner._preferred_temporality, inner._preferred_aggregation)
        self._inner = inner
        self._histograms = histograms

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        metrics = metrics_data.resource_metrics[0].scope_metrics[0].metrics
        added = [histogram.metric() for histogram in self._histograms]
        metrics.extend(metric for metric in added if metric is not None)  # type: ignore[attr-defined]
        return self._inner.export(metrics_data, timeout_millis, **kwargs)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._inner.shutdown(timeout_millis, **kwargs)


class HistogramCollector(Collector):
    """``histograms`` for a Prometheus registry, named as OpenTelemetry's Prometheus
    compatibility specification says."""

    def __init__(self, histograms: Sequence[BucketHistogram]) -> None:
        self._histograms = histograms

    def collect(self) -> Iterator[HistogramMetricFamily]:
        for histogram in self._histograms:
            points = list(histogram.points())
            if not points:
                continue
            keys = [key for key, _ in points[0][0]]
            family = HistogramMetricFamily(
                histogram.name.replace(".", "_"),
                histogram.description,
                labels=[key.replace(".", "_") for key in keys],
                unit="seconds" if histogram.unit == "s" else "",
            )
            for labels, counts, total in points:
                family.add_metric(
                    [_label_text(value) for _, value in labels],
                    _cumulated(histogram.bounds, counts),
                    total,
                )
            yield family


def _cumulated(
    bounds: Sequence[float], counts: Sequence[int]
) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def _label_text(value: str | bool | int) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
