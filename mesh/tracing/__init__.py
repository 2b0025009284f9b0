"""OpenTelemetry spans of requests, where the extra `spanmesh[otel]` is installed and switched on."""

from mesh.tracing.request_span import RequestSpan, current_span
from mesh.tracing.tracer import RequestTracer, closing, open_tracer

__all__ = ["RequestSpan", "RequestTracer", "closing", "current_span", "open_tracer"]
