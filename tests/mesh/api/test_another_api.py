"""Another API is a module of its own: here one whose streams are lines of JSON, which have no comments."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import Request
from starlette.responses import Response

from mesh.api.answering import Answer, respond
from mesh.api.app import create_app
from mesh.api.auth import client_of
from mesh.api.backend import Backend, body_of
from mesh.api.errors import error_body, json_bytes, json_response
from mesh.api.event_stream import StreamForm
from mesh.api.generation_job import make_job
from mesh.api.on_demand import answered
from mesh.api.protocol import CompletionBody
from mesh.metrics.tracing import RequestTracer
from mesh.text.message_parts import Content
from mesh.text.text_service import TextRequest
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import Overloaded, StageFailed
from tests.support import api_harness
from tests.support.api_harness import ScriptedEngine, running_api
from tests.support.on_demand import on_demand_api

pytestmark = pytest.mark.model

tokenizer = api_harness.tokenizer

PATH = "/api/generate"
ASKED: Any = {"prompt": "Hello", "stream": True}
TOKENS = (300, 301, 302)
router = APIRouter()


def line(fields: dict[str, Any]) -> bytes:
    return json_bytes(fields) + b"\n"


class LinesAnswer(Answer):
    form = StreamForm(
        "application/x-ndjson",
        comment=lambda _text: b"\n",
        failed=lambda error: line({"error": error_body(error)["error"]["message"]}),
    )

    async def texts(self) -> AsyncIterator[tuple[str, bool]]:
        async with aclosing(self.choices.parts()) as parts:
            async for part in parts:
                text = "".join(piece.text for piece in part.message_parts if isinstance(piece, Content))
                yield text, part.finish is not None

    async def whole(self) -> Response:
        return json_response({"response": "".join([text async for text, _ in self.texts()]), "done": True})

    async def produce(self, emit: Callable[[bytes], Awaitable[None]]) -> None:
        async for text, is_done in self.texts():
            await emit(line({"response": text, "done": is_done}))


@router.post(PATH, response_model=None)
async def generate(request: Request) -> Response:
    body = await body_of(request, CompletionBody)
    client = client_of(request.scope)

    async def answer(backend: Backend) -> Response:
        wanted = [TextRequest(str(body.prompt[0]), "prompt")]
        (tokens,) = await backend.texts.ids(wanted, most_tokens=64, client=client)
        job = make_job(backend, body, tokens, prompt_param="prompt", client=client)
        return await respond(request, backend, [job], LinesAnswer, is_streamed=bool(body.stream))

    return await answered(request, body.model, answer, form=LinesAnswer.form if body.stream else None)


@pytest.fixture(autouse=True)
def _with_this_api(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_router(*given: Any, **more: Any) -> FastAPI:
        app = create_app(*given, **more)
        app.include_router(router)
        return app

    monkeypatch.setattr(api_harness, "create_app", with_router)


def text_of(tokenizer: Tokenizer) -> str:
    return b"".join(map(tokenizer.piece, TOKENS)).decode()


async def test_it_answers_whole_and_as_lines(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([TOKENS[:1], TOKENS[1:]]), tokenizer) as api:
        whole = (await api.http.post(PATH, json={**ASKED, "stream": False})).json()
        streamed = await api.http.post(PATH, json=ASKED)
    assert whole == {"response": text_of(tokenizer), "done": True}
    assert streamed.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(each) for each in streamed.text.splitlines()]
    assert "".join(each["response"] for each in lines) == text_of(tokenizer)
    assert [each["done"] for each in lines] == [False] * (len(lines) - 1) + [True]


async def test_its_silent_streams_are_kept_alive_in_its_own_way(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([0.5, TOKENS[:1], 0.5, TOKENS[1:]])
    async with running_api(engine, tokenizer, ping_interval_s=0.1) as api:
        text = (await api.http.post(PATH, json=ASKED)).text
    assert text.startswith("\n\n")
    assert all(not each or "response" in json.loads(each) for each in text.split("\n"))


async def test_its_failures_are_its_own_in_mid_stream_and_a_status_before(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([TOKENS[:1], StageFailed("stage 1 went away")])
    async with running_api(engine, tokenizer) as api:
        *_, last = (await api.http.post(PATH, json=ASKED)).text.splitlines()
        assert json.loads(last) == {"error": "stage 1 went away"}
        engine.steps = [Overloaded("all slots are taken")]
        assert (await api.http.post(PATH, json=ASKED)).status_code == 429


@pytest.mark.parametrize("error", [None, StageFailed("its process ended")])
async def test_its_streams_wait_for_models_that_are_loaded_on_demand(
    tokenizer: Tokenizer, error: StageFailed | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.api.event_stream._LONGEST_GRACE_S", 0.1)
    async with on_demand_api(tokenizer, ping_interval_s=0.02) as mesh:
        mesh.models.may_finish.clear()
        if error is not None:
            mesh.models.errors["small"] = error
        lines: list[str] = []
        async with (
            asyncio.timeout(60),
            mesh.api.http.stream("POST", PATH, json={**ASKED, "model": "small"}) as response,
        ):
            assert response.headers["content-type"] == "application/x-ndjson"
            async for each in response.aiter_lines():
                lines.append(each)
                if lines.count("") == 2:
                    mesh.models.may_finish.set()
    last = json.loads([each for each in lines if each][-1])
    assert last["done"] if error is None else "its process ended" in last["error"]


async def test_its_requests_are_traced(tokenizer: Tokenizer) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with running_api(ScriptedEngine([TOKENS]), tokenizer, tracer=RequestTracer(provider)) as api:
        await api.http.post(PATH, json=ASKED)
        await api.http.post("/mesh/drain", json={"host": "attic"})
        await api.http.post("/api/nothing", json={})
        await api.http.get("/health")
    (span,) = spans.get_finished_spans()
    assert span.name == f"POST {PATH}"
    assert [event.name for event in span.events] == ["first_token", "finish"]
