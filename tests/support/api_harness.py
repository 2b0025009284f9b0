"""The real app on a real socket, in the test's own event loop."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from mesh.api.api_keys import ApiKeys
from mesh.api.app import create_app
from mesh.api.backend import ApiContext, Backend, Backends
from mesh.api.http_server import serve_api
from mesh.engine import Committed, Engine, GenerationRequest, GenerationStats
from mesh.metrics.tracing import RequestTracer
from mesh.status import MeshStatus
from mesh.text.tokenizer import Tokenizer
from stages.sampling.sampler import TokenLogprobs

# For clients that speak plain HTTP only, so that none reads all authorities of the system.
NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
MODEL = "smollm2"
KEY = "sk-of-alice"


@dataclass
class Api:
    """A running server, two ways to talk to it, and what models it answers for."""

    url: str
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    backends: Backends | None = None


def app_of(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    keys: ApiKeys | None = None,
    cors_origins: Sequence[str] = (),
    tracer: RequestTracer | None = None,
    **given: Any,
) -> FastAPI:
    """An app with one model; `given` are fields of `Backend` and of `ApiContext`."""
    shared = {each.name: given.pop(each.name) for each in fields(ApiContext) if each.name in given}
    backend = backend_of(engine, tokenizer, api=ApiContext(**shared), **given)
    return create_app(Backends(backend), api_keys=keys, cors_origins=cors_origins, tracer=tracer)


def backend_of(engine: Engine, tokenizer: Tokenizer, *, api: ApiContext, **given: Any) -> Backend:
    """A backend that is ready, unless `given`, fields of `Backend`, say otherwise."""
    defaults = {"model_id": MODEL, "created": 1_700_000_000, "status": MeshStatus, "ready": lambda: True}
    return Backend(api=api, engine=engine, tokenizer=tokenizer, **{**defaults, **given})


@asynccontextmanager
async def running_api(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    keys: ApiKeys | None = None,
    ready: Callable[[], bool] = lambda: True,
    ping_interval_s: float = 5.0,
    max_connections: int | None = None,
    patience_s: float = 60.0,
    **hosts: Any,
) -> AsyncIterator[Api]:
    """Serve `engine` on a free port; `hosts` are arguments of `app_of`."""
    app = app_of(
        engine,
        tokenizer,
        keys=keys,
        **{"ready": ready, "ping_interval_s": ping_interval_s, **hosts},
    )
    async with (
        serve_api(app, "127.0.0.1", 0, max_connections=max_connections, patience_s=patience_s) as url,
        httpx.AsyncClient(base_url=url, timeout=60, verify=NO_AUTHORITIES) as http,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=KEY,
            max_retries=0,
            timeout=60,
            http_client=openai.DefaultAsyncHttpxClient(verify=NO_AUTHORITIES),
        ) as client,
    ):
        yield Api(url, http, client, app.state.backends)


@dataclass
class ScriptedEngine:
    """An engine for what a healthy one does not do: fail, stall, or commit several tokens at a time."""

    steps: Sequence[tuple[int, ...] | float | Exception]
    """Token ids that are committed together, or a pause in seconds, or an error to raise."""
    stats: GenerationStats = field(default_factory=GenerationStats)
    """Goes with every step."""
    likeliest: tuple[tuple[int, float], ...] = ()
    """What else was likely, at every token, if a request asks for logprobs."""
    context_length: int = 64
    requests: list[GenerationRequest] = field(default_factory=list)
    num_running: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """Play the steps; the last one ends the answer."""
        self.requests.append(request)
        self.num_running += 1
        try:
            for index, step in enumerate(self.steps):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                is_last = index == len(self.steps) - 1
                ends = step[-1] in request.end_tokens
                finish: Any = ("stop" if ends else "length") if is_last else None
                scored = request.prompt[1:] if request.scores_prompt and index == 0 else ()
                scores = self._logprobs(request, scored)
                yield Committed(step, finish, self.stats, self._logprobs(request, step), scores)
        finally:
            try:
                await asyncio.sleep(0)  # closing a session takes a message or two
            finally:
                self.num_running -= 1
                self.closed.set()

    def _logprobs(self, request: GenerationRequest, step: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
        if request.num_top_logprobs is None:
            return ()
        return tuple(
            TokenLogprobs(-token / 1000, self.likeliest[: request.num_top_logprobs]) for token in step
        )


# Fixtures: a test file that binds these names has them.


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([(300,), (301, 302)])


@pytest.fixture
async def api(engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(engine, tokenizer) as api:
        yield api
