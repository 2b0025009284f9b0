"""What is seen from outside: counts kept where things happen, and one place that publishes them."""

from mesh.metrics.observed_engine import ObservedEngine
from mesh.metrics.request_statistics import RequestStatistics

__all__ = ["ObservedEngine", "RequestStatistics"]
