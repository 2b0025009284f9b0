"""Metrics and traces: counts kept where things happen, and one place that publishes them."""
