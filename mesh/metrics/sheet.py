"""Samples under construction: families in the order in which they are first named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from mesh.metrics.histogram import Histogram


class Sheet(Collector):
    """What one scrape gets.

    Args:
        model: Label of every sample, as vLLM has it; of those that follow `of`, another's.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._families: dict[str, Metric] = {}

    def of(self, model: str) -> None:
        """What is added from now on is of this model."""
        self._model = model

    def counter(self, name: str, help_: str, value: float, **labels: str) -> None:
        """Add a sample that only grows; `_total` comes behind its name."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = CounterMetricFamily(name, help_)
        family.add_sample(f"{name}_total", self._labels(labels), value)

    def gauge(self, name: str, help_: str, value: float, **labels: str) -> None:
        """Add a sample that goes up and down."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = GaugeMetricFamily(name, help_)
        family.add_sample(name, self._labels(labels), value)

    def histogram(self, name: str, help_: str, histogram: Histogram) -> None:
        """Add a histogram."""
        family = self._families.get(name)
        if not isinstance(family, HistogramMetricFamily):
            family = self._families[name] = HistogramMetricFamily(name, help_, labels=["model_name"])
        buckets = [(_bound(bound), count) for bound, count in histogram.cumulative()]
        family.add_metric([self._model], buckets, histogram.total)

    def collect(self) -> Iterator[Metric]:
        """What `prometheus_client` asks of a collector."""
        yield from self._families.values()

    def _labels(self, labels: dict[str, str]) -> dict[str, str]:
        return {"model_name": self._model, **labels}


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))
