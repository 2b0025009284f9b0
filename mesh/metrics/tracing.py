"""OpenTelemetry spans of requests."""

from __future__ import annotations

import os
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto import SOFTWARE_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

CURRENT_SPAN: Final[ContextVar[RequestSpan | None]] = ContextVar("request_span", default=None)
"""Span of the request in whose task this is; None where requests are not traced."""
_SWITCHES: Final = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
)
_EXPORTER: Final = "otlp"
_PROTOCOL: Final = "http/protobuf"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

log = structlog.get_logger()


class RequestSpan:
    """Events of one request, by the names of OpenTelemetry's conventions where they have one.

    Prompts, answers and keys never go in.

    Args:
        span: OpenTelemetry's own.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self._reasons: tuple[str, ...] = ()
        self._num_prompt_tokens = 0
        self._num_answer_tokens = 0

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Within the block, and in tasks that begin there, `CURRENT_SPAN` holds it."""
        token = CURRENT_SPAN.set(self)
        try:
            yield
        finally:
            CURRENT_SPAN.reset(token)

    def asks(self, model: str) -> None:
        """The request means another model than the first."""
        self._span.set_attribute("gen_ai.request.model", model)

    def event(self, name: str, **counts: int) -> None:
        """Something happened now."""
        self._span.add_event(name, {f"spanmesh.{key}": value for key, value in counts.items()})

    def finished(self, reason: str, *, num_prompt_tokens: int, num_answer_tokens: int) -> None:
        """An answer is over; a request may have several."""
        self.event("finish", num_answer_tokens=num_answer_tokens)
        self._reasons = (*self._reasons, reason)
        self._num_prompt_tokens += num_prompt_tokens
        self._num_answer_tokens += num_answer_tokens
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": self._reasons,
                "gen_ai.usage.input_tokens": self._num_prompt_tokens,
                "gen_ai.usage.output_tokens": self._num_answer_tokens,
            }
        )

    def responded(self, status: int) -> None:
        """The response's head is out."""
        self._span.set_attribute("http.response.status_code", status)


class RequestTracer:
    """Makes a span for each request.

    Args:
        provider: Of OpenTelemetry's SDK; whatever processors it has get the spans.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415 - an extra

        self._provider = provider
        self._tracer = provider.get_tracer("spanmesh", SOFTWARE_VERSION)
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    @contextmanager
    def request(
        self, method: str, path: str, headers: Mapping[str, str], model: str
    ) -> Iterator[RequestSpan]:
        """A span around the block, a child of the one that `traceparent` names, if it does.

        Args:
            method: Of the HTTP request.
            path: Of the route.
            headers: `traceparent` and `tracestate`, if they came.
            model: The served one.
        """
        from opentelemetry.trace import SpanKind  # noqa: PLC0415 - an extra

        with self._tracer.start_as_current_span(
            f"{method} {path}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            {
                "http.request.method": method,
                "url.path": path,
                "gen_ai.provider.name": "spanmesh",
                "gen_ai.request.model": model,
            },
            # What an exception says may quote the request.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            traced = RequestSpan(span)
            with traced.as_current():
                yield traced

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def open_tracer(environment: Mapping[str, str] = os.environ) -> RequestTracer | None:
    """The tracer that the environment asks for; None if it asks for none, or the extra is not installed.

    Nothing of OpenTelemetry is imported unless both are there.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    wanted = [name for name in _SWITCHES if environment.get(name, "none") not in {"", "none"}]
    # `none` switches spans off, though the endpoint is there for metrics or logs of others.
    if not wanted or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if (strange := _what_is_not_spoken(environment)) is not None:
        log.warning("not_tracing", asked_by=strange, remedy=f"send to a collector by OTLP over {_PROTOCOL}")
        return None
    if not _is_installed():
        log.warning("not_tracing", asked_by=wanted[0], remedy="pip install 'spanmesh[otel]'")
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    # The environment's own OTEL_SERVICE_NAME wins.
    name = environment.get("OTEL_SERVICE_NAME") or "spanmesh"
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    log.info("tracing", asked_by=wanted[0])
    return RequestTracer(provider)


@contextmanager
def closing(tracer: RequestTracer | None) -> Iterator[None]:
    """Send what is left when the block ends."""
    try:
        yield
    finally:
        if tracer is not None:
            tracer.close()


def _what_is_not_spoken(environment: Mapping[str, str]) -> str | None:
    """The variable that asks for another exporter or protocol than the only one there is, with its value."""
    exporter = environment.get("OTEL_TRACES_EXPORTER") or _EXPORTER
    if exporter != _EXPORTER:
        return f"OTEL_TRACES_EXPORTER={exporter}"
    # What is said of traces counts before what is said of all.
    found = next(((name, environment[name]) for name in _PROTOCOLS if environment.get(name)), None)
    return None if found is None or found[1] == _PROTOCOL else "=".join(found)


def _is_installed() -> bool:
    names = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    try:
        return all(find_spec(name) is not None for name in names)
    except ModuleNotFoundError:
        return False
