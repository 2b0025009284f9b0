"""Metrics and traces: counters kept where events happen, and their publication."""
