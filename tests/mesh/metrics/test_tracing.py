"""Spans of requests, by OpenTelemetry's own SDK; and that nothing of it is imported where nobody asks."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from mesh.api.api_keys import ApiKeys
from mesh.engine import GenerationStats
from mesh.metrics.tracing import RequestTracer, open_tracer
from spanmesh_proto.errors import StageFailed
from tests.support import api_harness
from tests.support.api_harness import KEY, ScriptedEngine, running_api

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from mesh.text.tokenizer import Tokenizer

tokenizer = api_harness.tokenizer
CHAT = "/v1/chat/completions"
SECRET = "a rabbit in the garden"
ASKED: Any = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> RequestTracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return RequestTracer(provider)


def events_of(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


@pytest.mark.model
class TestRequests:
    @pytest.mark.parametrize("is_stream", [False, True])
    async def test_a_request_is_one_span_with_what_happened_in_it(
        self, tokenizer: Tokenizer, tracer: RequestTracer, spans: InMemorySpanExporter, *, is_stream: bool
    ) -> None:
        engine = ScriptedEngine([(300,), (301, 302)], GenerationStats(num_cached=4))
        async with running_api(engine, tokenizer, tracer=tracer) as api:
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            response = await api.http.post(CHAT, json={**ASKED, "stream": is_stream}, headers=headers)
            assert response.status_code == 200
        (span,) = spans.get_finished_spans()
        assert span.name == f"POST {CHAT}"
        assert span.kind.name == "SERVER"
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == PARENT_ID
        assert events_of(span) == ["first_token", "finish"]
        attributes = dict(span.attributes or {})
        assert attributes["gen_ai.usage.output_tokens"] == 3
        assert attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert attributes["http.response.status_code"] == 200
        assert SECRET not in span.to_json()
        first, last = span.events
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= first.timestamp <= last.timestamp <= span.end_time

    async def test_a_repair_is_told(
        self, tokenizer: Tokenizer, tracer: RequestTracer, spans: InMemorySpanExporter
    ) -> None:
        engine = ScriptedEngine([(300,), (301,)], GenerationStats(num_replays=1))
        async with running_api(engine, tokenizer, tracer=tracer) as api:
            await api.http.post(CHAT, json=ASKED)
        (span,) = spans.get_finished_spans()
        assert events_of(span) == ["first_token", "repair", "finish"]

    async def test_requests_at_once_keep_apart(
        self, tokenizer: Tokenizer, tracer: RequestTracer, spans: InMemorySpanExporter
    ) -> None:
        engine = ScriptedEngine([(300,), (301,)])
        async with running_api(engine, tokenizer, tracer=tracer) as api:
            # One span for three prompts.
            await api.http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 2})
            await api.http.post(CHAT, json=ASKED)
        three, one = spans.get_finished_spans()
        assert events_of(three).count("finish") == 3
        assert dict(three.attributes or {})["gen_ai.usage.output_tokens"] == 6
        assert events_of(one).count("finish") == 1
        assert three.context.trace_id != one.context.trace_id

    async def test_what_fails_is_told_without_what_was_asked(
        self, tokenizer: Tokenizer, tracer: RequestTracer, spans: InMemorySpanExporter
    ) -> None:
        async with running_api(ScriptedEngine([StageFailed("gone")]), tokenizer, tracer=tracer) as api:
            assert (await api.http.post(CHAT, json=ASKED)).status_code == 503
        (span,) = spans.get_finished_spans()
        assert dict(span.attributes or {})["http.response.status_code"] == 503
        assert events_of(span) == ["finish"]
        assert SECRET not in span.to_json()

    async def test_who_has_no_key_leaves_no_span(
        self, tokenizer: Tokenizer, tracer: RequestTracer, spans: InMemorySpanExporter
    ) -> None:
        keys = ApiKeys.from_plain({"alice": KEY})
        async with running_api(ScriptedEngine([(300,)]), tokenizer, keys=keys, tracer=tracer) as api:
            assert (await api.http.post(CHAT, json=ASKED)).status_code == 401
            headers = {"authorization": f"Bearer {KEY}"}
            assert (await api.http.get("/mesh/status", headers=headers)).status_code == 200
            assert not spans.get_finished_spans()
            assert (await api.http.post(CHAT, json=ASKED, headers=headers)).status_code == 200
        (span,) = spans.get_finished_spans()
        assert KEY not in span.to_json()


class TestSwitch:
    @pytest.mark.parametrize(
        "environment",
        [
            {},
            {"OTEL_TRACES_EXPORTER": "none"},
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        ],
    )
    def test_nobody_asks(self, environment: dict[str, str]) -> None:
        assert open_tracer(environment) is None

    @pytest.mark.parametrize(
        "asked_by",
        [
            "OTEL_TRACES_EXPORTER=console",
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json",
        ],
    )
    def test_what_is_not_spoken_is_named(self, asked_by: str) -> None:
        name, _, value = asked_by.partition("=")
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", name: value}
        with capture_logs() as logs:
            assert open_tracer(environment) is None
        assert [each["asked_by"] for each in logs] == [asked_by]

    def test_the_standard_variables_switch_it_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        tracer = open_tracer()
        assert tracer is not None
        tracer.close()

    def test_nothing_is_imported_unless_somebody_asks(self) -> None:
        code = (
            "import sys, mesh.api, mesh.serve.main; from mesh.metrics.tracing import open_tracer;"
            "assert open_tracer({}) is None;"
            # FastAPI looks for the bare API by itself.
            "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
        )
        environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
        assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0

    def test_a_missing_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mesh.metrics.tracing.find_spec", lambda _name: None)
        assert open_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
